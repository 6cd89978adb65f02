"use strict";
// Puts the page together: controls, theme, table and sections, drawn anew whenever a choice changes.

const choices = { axis: null };

/** Show a family: its variants to choose from, its filters, and the table of its workload. */
function showFamily(name) {
  const family = data.families.find((other) => other.name === name) ?? data.families[0];
  Object.assign(state, { family: family.name, a: family.a, b: family.b, filters: {} });
  for (const side of ["a", "b"]) {
    document.getElementById(side).replaceChildren(...family.sides.map((variant) => new Option(variant, variant, false, variant === state[side])));
  }
  const filters = [];
  for (const field of ["op", "dtype", "quant", "policy", "device"]) {
    const values = [...new Set(familyCases().map((c) => c[field]))];
    if (values.length < 2) continue;
    const label = select(field, [["all", ""], ...values.map((value) => [value, value])], "", (value) => { state.filters[field] = value; draw(); });
    label.querySelector("select").id = `filter-${field}`;
    filters.push(label);
  }
  document.getElementById("filters").replaceChildren(...filters);
  document.getElementById("family").value = family.name;
  document.getElementById("h-table").textContent = data.families.length > 1 ? `${family.name}: A against B` : "A against B";
  for (const own of document.querySelectorAll("[data-family]")) own.hidden = own.dataset.family !== family.name;
  draw();
}

function controls() {
  const families = document.getElementById("family");
  families.append(...data.families.map(({ name }) => new Option(name, name)));
  families.parentElement.hidden = data.families.length < 2;
  families.addEventListener("change", () => { location.hash = `family=${encodeURIComponent(families.value)}`; });
  addEventListener("hashchange", followHash);
  for (const side of ["a", "b"]) {
    const list = document.getElementById(side);
    list.addEventListener("change", () => { state[side] = list.value; draw(); });
  }
  const text = document.getElementById("text");
  text.addEventListener("input", () => { state.text = text.value; draw(); });
  const bar = document.getElementById("controls");
  bar.addEventListener("submit", (event) => event.preventDefault());
  new ResizeObserver(() => { // a link to a section leaves its heading below the bar
    document.documentElement.style.scrollPaddingTop = `${8 + (getComputedStyle(bar).position === "sticky" ? bar.offsetHeight : 0)}px`;
  }).observe(bar);
  document.getElementById("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
}

/** Show the family that the address names, and move the focus to its table. */
function followHash() {
  if (!location.hash.startsWith("#family=")) return;
  showFamily(decodeURIComponent(location.hash.slice(8)));
  document.getElementById("h-table").scrollIntoView();
  document.getElementById("table").focus({ preventScroll: true });
}

function scalingSection(cases) {
  const axes = [...new Set(cases.flatMap((c) => Object.keys(c.axes)))].filter((axis) => series(cases, axis).length);
  if (!axes.length) return null;
  if (!axes.includes(choices.axis)) choices.axis = axes.includes("E") ? "E" : axes[0];
  const pick = select("axis", axes.map((axis) => [axis, axis]), choices.axis, (axis) => { choices.axis = axis; draw(); });
  const note = "Time against one axis with all others fixed, both logarithmic. The dashed line is linear scaling from B's smallest size: flatter than it is sublinear.";
  return section("scaling", "Scaling", note, element("div", { class: "bar" }, pick), cards(scalingCards(cases, choices.axis)));
}

function tuningSection() {
  const ops = new Set(familyCases().map((c) => c.op));
  const kept = (e) => ops.has(e.op) && Object.entries(state.filters).every(([name, value]) => !value || e[name] === undefined || e[name] === value);
  const sizes = (e) => Object.entries(e.axes).map(([axis, size]) => `${axis}=${size}`);
  const evidence = data.evidence.filter((e) => kept(e) && shown([e.variant]).length && searched(e.case, e.shape, e.settings, e.config, ...sizes(e)));
  if (!evidence.length) return null;
  return section("evidence", "Tuning: the gain", "Time of the default config over the time of the tuned config, from the evidence kept with every cached config.", cards(evidenceCards(evidence)));
}

function failuresSection(cases) {
  const rows = cases.flatMap((c) => Object.entries(c.of).filter(([, r]) => r.us == null).map(([variant, r]) => ({ c, variant, r })));
  if (!rows.length) return null;
  const groups = d3.groups(rows, (d) => [d.c.op, d.c.quant, d.variant, d.r.status, d.r.reason].join("\u0000")).map(([, group]) => group);
  const head = ["op", "quant", "variant", "status", "cases", "reason"].map((name) => element("th", { scope: "col" }, element("b", {}, name)));
  const lines = groups.map((group) => {
    const { c, variant, r } = group[0];
    const cells = [c.op, c.quant, variant, r.status, String(group.length)].map((text) => element("td", {}, text));
    return element("tr", {}, ...cells, element("td", { class: "reason" }, r.reason || "not timed"));
  });
  const table = element("table", {}, element("thead", { class: "plain" }, element("tr", {}, ...head)), element("tbody", {}, ...lines));
  return section("untimed", "Without a time", "What failed its check, was skipped, or passed it without being timed.", element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Rows without a time" }, table));
}

function draw() {
  const cases = visibleCases();
  drawTable(cases);
  document.getElementById("speedups").replaceChildren(...[speedupFigure(comparedRows(cases))].filter(Boolean));
  const timed = cases.filter((c) => Object.values(c.of).some((r) => r.us != null));
  const variants = data.variants.filter((variant) => timed.some((c) => c.of[variant]?.us != null));
  const parts = [];
  if (timed.length) {
    parts.push(section("ceiling", `Share of the ${bounds(timed)}`, "The ceiling is a streaming kernel with the same bytes and mix, timed in the same run; the peak is the data sheet's, for cases that arithmetic bounds. Hover for times and configs; the chips hide variants in every chart.", legend(variants, draw), cards(ceilingCards(timed))));
    parts.push(section("peers", "Variants and peers", `Time over the time of ${state.b}, logarithmic: right of 1x is slower than ${state.b}.`, legend(variants, draw), cards(peerCards(timed))));
    parts.push(scalingSection(timed));
  }
  parts.push(tuningSection(), failuresSection(cases));
  const focus = document.activeElement?.getAttribute("aria-label") || document.activeElement?.textContent;
  const inCharts = document.getElementById("charts").contains(document.activeElement);
  document.getElementById("charts").replaceChildren(...parts.filter(Boolean));
  const links = [...document.querySelectorAll("main section:not([hidden])")].map((part) => element("a", { href: `#${part.id || "table"}`, onclick: () => { const more = part.querySelector("details.more"); if (more) more.open = true; } }, part.querySelector("h2").textContent));
  document.getElementById("sections").replaceChildren(...links);
  if (inCharts) [...document.querySelectorAll("#charts button, #charts select")].find((node) => (node.getAttribute("aria-label") || node.textContent) === focus)?.focus();
}

controls();
showFamily(data.families[0].name);
followHash();
