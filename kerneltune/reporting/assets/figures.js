"use strict";
// Small helpers that the table and the charts share: elements, formats, one figure with its title, text and data table.

const data = JSON.parse(document.getElementById("data").textContent);
const state = { family: data.families[0].name, a: "", b: "", filters: {}, text: "", hidden: new Set() };
const SYMBOLS = ["circle", "square", "triangle", "diamond2", "star", "wye", "cross", "asterisk"];

const BEST = "best-peer";

/** A variant's name decides its colour and symbol, so that both are the same on all pages. */
const colour = (variant) => `var(--c${data.looks[variant][0]})`;
const symbol = (variant) => SYMBOLS[data.looks[variant][1]];
/** The result of A or B on a case: of a variant, or of the fastest peer. */
const side = (c, name) => (name === BEST ? c.best : c.of[name]);
const bounds = (cases) => [...new Set(cases.map((c) => c.bound))].filter(Boolean).join(" or ") || "bound";
const axisNames = (axes) => Object.keys(axes).join("×");
const shown = (variants) => variants.filter((variant) => !state.hidden.has(variant));
const fixed = (value, digits) => (value == null ? "" : value.toFixed(digits));
const micros = (us) => `${us < 10 ? us.toFixed(2) : us.toFixed(1)} µs`;
const geomean = (values) => Math.exp(d3.mean(values, Math.log));
const symbols = (variants) => ({ domain: variants, range: variants.map(symbol) });
const colours = (variants) => ({ domain: variants, range: variants.map(colour) });

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

/** Whether all words of the search text are among these. */
function searched(...texts) {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const text = texts.join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

/** The cases of the chosen family. */
const familyCases = () => data.cases.filter((c) => c.family === state.family);

/** The cases that the filters and the search text leave. */
function visibleCases() {
  return familyCases().filter((c) => {
    if (Object.entries(state.filters).some(([name, value]) => value && c[name] !== value)) return false;
    return searched(c.case, c.shape, c.label, ...Object.values(c.of).map((r) => r.config || ""));
  });
}

/** Cases that one chart shows: what they are called differs in nothing but the shape. */
const grouped = (cases) => d3.groups(cases, (c) => c.title).map(([, group]) => group);

/** One chart in a card.
 * `draw(width)` answers with an SVG whose value is the datum under the pointer, which `tell` puts into words;
 * `columns` maps the headings of the table of `rows` to functions of a row. */
function figure(title, note, alt, draw, tell, rows, columns) {
  const place = element("div", { role: "img", "aria-label": alt });
  const heading = element("h3", {}, title, note ? element("small", {}, note) : null);
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.floor(place.clientWidth);
    if (!width || width === last) return;
    last = width;
    const svg = draw(width);
    svg.addEventListener("input", () => { bubble.textContent = svg.value ? tell(svg.value) : ""; });
    place.replaceChildren(svg);
  }).observe(place);
  place.addEventListener("pointermove", showBubble);
  place.addEventListener("pointerdown", showBubble);
  place.addEventListener("pointerleave", (event) => { bubble.hidden ||= event.pointerType === "mouse"; });
  return element("figure", {}, element("figcaption", {}, heading), place, values(rows, columns));
}

const bubble = element("div", { id: "bubble", hidden: "" });
document.body.append(bubble);
addEventListener("scroll", () => { bubble.hidden = true; }, { passive: true, capture: true });
addEventListener("pointerdown", (event) => { bubble.hidden ||= !event.target.closest("figure svg"); });

/** The words for the datum under the pointer, beside it and inside the window. */
function showBubble(event) {
  requestAnimationFrame(() => {
    if (!event.target.isConnected) return;
    bubble.hidden = !bubble.textContent;
    const { width, height } = bubble.getBoundingClientRect();
    const right = event.clientX + 16 + width < innerWidth - 8;
    const below = event.clientY + 16 + height < innerHeight - 8;
    bubble.style.left = `${Math.max(8, right ? event.clientX + 16 : Math.min(event.clientX - 16 - width, innerWidth - width - 8))}px`;
    bubble.style.top = `${Math.max(8, below ? event.clientY + 16 : event.clientY - 16 - height)}px`;
  });
}

/** The numbers behind a chart as a table, made when it is opened. */
function values(rows, columns) {
  const body = element("div", { tabindex: "0", role: "region", "aria-label": "Values of the chart" });
  const fill = () => {
    if (body.firstChild) return;
    const head = element("tr", {}, ...Object.keys(columns).map((name) => element("th", { scope: "col" }, name)));
    const lines = rows.map((row) => element("tr", {}, ...Object.values(columns).map((get) => element("td", {}, String(get(row) ?? "")))));
    body.append(element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines)));
  };
  return element("details", { ontoggle: fill }, element("summary", {}, "values"), body);
}

/** Chips that show and hide variants in all charts. */
function legend(variants, changed) {
  const chips = variants.map((variant) => {
    const mark = d3.symbol(d3[`symbol${symbol(variant)[0].toUpperCase()}${symbol(variant).slice(1)}`], 60)();
    const icon = d3.create("svg").attr("viewBox", "-6 -6 12 12").attr("aria-hidden", "true");
    icon.append("path").attr("d", mark).attr("fill", colour(variant)).attr("stroke", colour(variant));
    const toggle = () => {
      if (!state.hidden.delete(variant)) state.hidden.add(variant);
      changed();
    };
    const pressed = String(!state.hidden.has(variant));
    return element("button", { type: "button", class: "chip", "aria-pressed": pressed, onclick: toggle }, icon.node(), variant);
  });
  return element("div", { class: "legend", role: "group", "aria-label": "Variants shown in the charts" }, ...chips);
}

function select(label, options, value, changed) {
  const list = element("select", { onchange: (event) => changed(event.target.value) });
  for (const [text, option] of options) list.append(new Option(text, option, false, option === value));
  return element("label", {}, label, list);
}

const cards = (found) => element("div", { class: "cards" }, ...found.filter(Boolean));

const opened = new Set();

/** A section that is closed at first: its charts are drawn when it is opened. */
function section(id, title, note, ...content) {
  const heading = element("h2", { id: `h-${id}` }, title);
  const more = element("details", { class: "more", ontoggle: () => (more.open ? opened.add(id) : opened.delete(id)) },
    element("summary", {}, heading), element("p", { class: "note" }, note), ...content);
  more.open = opened.has(id);
  return element("section", { id, "aria-labelledby": `h-${id}` }, more);
}
