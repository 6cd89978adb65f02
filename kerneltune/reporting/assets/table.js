"use strict";
// The A/B table: columns of the published report, then bounds, shares of the ceiling, peers and noise floors.

const sorting = { column: null, descending: false };

/** A against B on one case; `speedup` is null where a side has no time. */
function compared(c) {
  const [a, b] = [side(c, state.a), side(c, state.b)];
  const timed = a.us != null && b.us != null;
  const peer = c.best && c.best.is !== state.b ? c.best : null;
  const speedup = timed ? a.us / b.us : null;
  const isOneRun = timed && a.run === b.run; // an interval covers the noise within a run only
  return {
    c, a, b, speedup,
    low: isOneRun ? a.low / b.high : null,
    high: isOneRun ? a.high / b.low : null,
    mark: speedup > data.win ? "+" : speedup != null && speedup < data.loss ? "-" : "",
    peer: peer && b.us != null ? { name: peer.is, ratio: peer.us / b.us } : null,
    floor: d3.max([a.floor, b.floor].filter((floor) => floor != null)) ?? null,
    note: [["A", a], ["B", b]].filter(([, r]) => r.us == null).map(([side, r]) => `${side} ${r.status}: ${r.reason || "not timed"}`).join("; "),
  };
}

/** A column per axis; one for the whole shape, by its size, where rows have different axes. */
function sizeColumns(rows) {
  const kinds = new Set(rows.map((row) => axisNames(row.c.axes)));
  if (kinds.size > 1) {
    const volume = (row) => Object.values(row.c.axes).reduce((product, size) => product * size, 1);
    const cell = (row) => element("span", { title: axisNames(row.c.axes) }, row.c.shape);
    return [{ name: "shape", get: volume, show: cell, number: true }];
  }
  return Object.keys(rows[0]?.c.axes ?? {}).map((axis) => ({ name: axis, get: (row) => row.c.axes[axis], show: (row) => String(row.c.axes[axis]), number: true }));
}

/** What the columns hold; their names, digits and units come with the data, as those of every other table do. */
const MEASURES = {
  A_us: (row) => row.a.us ?? null,
  B_us: (row) => row.b.us ?? null,
  A_gbps: (row) => row.a.gbps ?? null,
  B_gbps: (row) => row.b.gbps ?? null,
  B_pct_bound: (row) => row.b.pct ?? null,
  speedup: (row) => row.speedup,
  interval: (row) => row.low,
  noise_pct: (row) => (row.floor == null ? null : 100 * row.floor),
};
const NARROW = new Set(["A_us", "B_us", "speedup"]);

function measureColumn({ key, name, digits, suffix }) {
  const get = MEASURES[key];
  const shows = {
    speedup: speedupCell,
    interval: (row) => (row.low == null ? "" : `${fixed(row.low, 2)}–${fixed(row.high, 2)}`),
  };
  return { name, get, show: shows[key] ?? ((row) => (get(row) == null ? "" : `${fixed(get(row), digits)}${suffix}`)), number: true, wide: !NARROW.has(key) };
}

function tableColumns(rows) {
  const measures = data.families.find((family) => family.name === state.family).columns;
  const text = (name, get) => ({ name, get, show: get });
  const number = (name, get, digits, wide) => ({ name, get, show: (row) => fixed(get(row), digits), number: true, wide });
  const columns = [
    text("kind", (row) => row.c.kind),
    ...measures.filter((spec) => spec.key === "speedup").map(measureColumn),
    text("dtype", (row) => row.c.dtype.replace("bfloat", "bf").replace("float", "fp")),
    text("quant", (row) => row.c.quant),
    ...(rows.some((row) => row.c.settings) ? [{ ...text("options", (row) => row.c.settings), words: true }] : []),
    ...sizeColumns(rows),
    ...(state.a === BEST ? [text("A is", (row) => row.a.is)] : []),
    ...measures.filter((spec) => MEASURES[spec.key] && spec.key !== "speedup").map(measureColumn),
    ...(state.a === BEST ? [] : [{ name: "× best peer", get: (row) => row.peer?.ratio ?? null, show: peerCell, number: true, wide: true }]),
  ];
  return columns.filter((column) => !column.wide || rows.some((row) => column.get(row) != null));
}

function speedupCell(row) {
  if (row.speedup == null) return "";
  const words = { "+": "faster", "-": "slower", "": "no difference beyond 5 %" }[row.mark];
  const style = { "+": "plus", "-": "minus", "": null }[row.mark];
  return element("span", { class: style, title: words }, `${fixed(row.speedup, 2)}x ${row.mark || "\u2007"}`);
}

const peerCell = (row) => (row.peer ? element("span", { title: row.peer.name }, fixed(row.peer.ratio, 2)) : "");

function sorted(rows, columns) {
  const column = columns.find((other) => other.name === sorting.column);
  if (!column) return rows;
  const missing = (row) => (column.get(row) == null ? 1 : 0);
  const order = sorting.descending ? d3.descending : d3.ascending;
  return [...rows].sort((x, y) => missing(x) - missing(y) || order(column.get(x), column.get(y)));
}

const comparedRows = (cases) => cases.filter((c) => side(c, state.a) && side(c, state.b)).map(compared);

function drawTable(cases) {
  const place = document.getElementById("table");
  const rows = comparedRows(cases);
  const columns = tableColumns(rows);
  const heads = columns.map((column) => {
    const order = sorting.column === column.name ? (sorting.descending ? "descending" : "ascending") : null;
    const sort = () => {
      sorting.descending = sorting.column === column.name ? !sorting.descending : false;
      sorting.column = column.name;
      drawTable(visibleCases());
      [...place.querySelectorAll("thead button")].find((button) => button.textContent === column.name)?.focus();
    };
    const button = element("button", { type: "button", onclick: sort }, column.name);
    return element("th", { scope: "col", class: cellClass(column), "aria-sort": order }, button);
  });
  const lines = sorted(rows, columns).map((row) => {
    const cells = columns.map((column) => element("td", { class: cellClass(column) }, column.show(row)));
    const why = row.note ? [element("td", { class: "reason" }, row.note)] : [];
    const configs = [["A", row.a], ["B", row.b]].map(([side, r]) => element("div", {}, `${side} ${r.config || "-"}`));
    const more = element("details", {}, element("summary", {}, "configs"), element("div", {}, `${row.c.case}: ${row.c.label}`), ...configs);
    return element("tr", {}, ...cells, ...(why.length ? why : [element("td", { class: "configs" }, more)]));
  });
  const caption = element("caption", {}, `A is ${state.a}, B is ${state.b}: ${rows.length} of ${familyCases().length} cases`);
  place.replaceChildren(element("table", {}, caption, element("thead", {}, element("tr", {}, ...heads, element("th", { scope: "col" }, "configs"))), element("tbody", {}, ...lines)));
  document.getElementById("table-hint").textContent = !rows.length ? `No case that is left has both ${state.a} and ${state.b}.` :
    "+ above 1.05x, - below 0.95x. Click a heading to sort; open a row's configs in the last column.";
  drawTiles(rows);
}

const cellClass = (column) => [column.number ? "num" : "", column.wide ? "wide-only" : "", column.words ? "words" : ""].join(" ").trim() || null;

function drawTiles(rows) {
  const timed = rows.filter((row) => row.speedup != null);
  const marks = (mark) => timed.filter((row) => row.mark === mark).length;
  const worst = d3.least(timed, (row) => row.speedup);
  const best = d3.greatest(timed, (row) => row.speedup);
  const shares = timed.map((row) => row.b.pct).filter((share) => share != null);
  const peers = timed.filter((row) => row.peer).map((row) => row.peer.ratio);
  const where = (row) => `${row.c.kind} ${row.c.quant} ${row.c.shape}`;
  const tiles = [
    [peers.length ? `${fixed(geomean(peers), 2)}x` : "–", `as fast as the best peer (${peers.length} rows)`],
    state.a === BEST
      ? [best ? `${fixed(best.speedup, 2)}x` : "–", best ? `highest: ${where(best)}` : "highest"]  // A is the best peer: said in the first tile
      : [timed.length ? `${fixed(geomean(timed.map((row) => row.speedup)), 2)}x` : "–", `as fast as A, geometric mean of ${timed.length} rows`],
    [`${marks("+")} / ${marks("")} / ${marks("-")}`, "faster / within 5 % / slower"],
    [worst ? `${fixed(worst.speedup, 2)}x` : "–", worst ? `lowest: ${where(worst)}` : "lowest"],
    [shares.length ? `${fixed(d3.median(shares), 1)} %` : "–", `of the ${bounds(timed.map((row) => row.c))}, B's median`],
  ];
  document.getElementById("tiles").replaceChildren(
    ...tiles.map(([number, text]) => element("div", { class: "tile" }, element("b", {}, number), element("span", {}, text))),
  );
}
