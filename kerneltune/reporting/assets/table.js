"use strict";
// The A/B table: columns of the published report, then bounds, shares of the ceiling, peers and noise floors.

const sorting = { column: null, descending: false };

/** A against B on one case; `speedup` is null where a side has no time. */
function compared(c) {
  const [a, b] = [c.of[state.a], c.of[state.b]];
  const timed = a.us != null && b.us != null;
  const others = Object.entries(c.of).filter(([variant, r]) => isPeer(c.op, variant) && variant !== state.b && r.us != null);
  const peer = d3.least(others, ([, r]) => r.us);
  const speedup = timed ? a.us / b.us : null;
  return {
    c, a, b, speedup,
    low: timed ? a.low / b.high : null,
    high: timed ? a.high / b.low : null,
    mark: speedup > data.win ? "+" : speedup != null && speedup < data.loss ? "-" : "",
    peer: peer && b.us != null ? { name: peer[0], ratio: peer[1].us / b.us } : null,
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

function tableColumns(rows) {
  const text = (name, get) => ({ name, get, show: get });
  const number = (name, get, digits, wide) => ({ name, get, show: (row) => fixed(get(row), digits), number: true, wide });
  const columns = [
    text("kind", (row) => row.c.kind),
    text("dtype", (row) => row.c.dtype.replace("bfloat", "bf").replace("float", "fp")),
    text("quant", (row) => row.c.quant),
    ...(rows.some((row) => row.c.options) ? [{ ...text("options", (row) => row.c.options), words: true }] : []),
    ...sizeColumns(rows),
    number("A ms", (row) => (row.speedup == null ? null : row.a.us / 1000), 4),
    number("B ms", (row) => (row.speedup == null ? null : row.b.us / 1000), 4),
    number("A GB/s", (row) => row.a.gbps ?? null, 1, true),
    number("B GB/s", (row) => row.b.gbps ?? null, 1, true),
    { name: "speedup", get: (row) => row.speedup, show: speedupCell, number: true },
    { name: "interval", get: (row) => row.low, show: (row) => (row.low == null ? "" : `${fixed(row.low, 2)}–${fixed(row.high, 2)}`), number: true, wide: true },
    number("B % ceiling", (row) => row.b.pct ?? null, 1, true),
    { name: "× best peer", get: (row) => row.peer?.ratio ?? null, show: peerCell, number: true, wide: true },
    { name: "A/A floor", get: (row) => row.floor, show: (row) => (row.floor == null ? "" : `${fixed(100 * row.floor, 1)} %`), number: true, wide: true },
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

function drawTable(cases) {
  const place = document.getElementById("table");
  const rows = cases.filter((c) => c.of[state.a] && c.of[state.b]).map(compared);
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
    return element("tr", { title: `${row.c.name}: ${row.c.label}\nA ${row.a.config || ""}\nB ${row.b.config || ""}` }, ...cells, ...why);
  });
  const caption = element("caption", {}, `A is ${state.a}, B is ${state.b}: ${rows.length} of ${data.cases.length} cases`);
  place.replaceChildren(element("table", {}, caption, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...lines)));
  document.getElementById("table-hint").textContent = !rows.length ? `No case that is left has both ${state.a} and ${state.b}.` :
    "+ above 1.05x, - below 0.95x. Click a heading to sort; hover a row for its configs, a peer's share for its name.";
  drawTiles(rows);
}

const cellClass = (column) => [column.number ? "num" : "", column.wide ? "wide-only" : "", column.words ? "words" : ""].join(" ").trim() || null;

function drawTiles(rows) {
  const timed = rows.filter((row) => row.speedup != null);
  const marks = (mark) => timed.filter((row) => row.mark === mark).length;
  const worst = d3.least(timed, (row) => row.speedup);
  const shares = timed.map((row) => row.b.pct).filter((share) => share != null);
  const peers = timed.filter((row) => row.peer).map((row) => row.peer.ratio);
  const where = (row) => `${row.c.kind} ${row.c.quant} ${row.c.shape}`;
  const tiles = [
    [timed.length ? `${fixed(geomean(timed.map((row) => row.speedup)), 2)}x` : "–", `geometric mean of ${timed.length} rows`],
    [`${marks("+")} / ${marks("")} / ${marks("-")}`, "wins / ties / losses"],
    [worst ? `${fixed(worst.speedup, 2)}x` : "–", worst ? `lowest: ${where(worst)}` : "lowest"],
    [shares.length ? `${fixed(d3.median(shares), 1)} %` : "–", "of the ceiling, B's median"],
    [peers.length ? `${fixed(geomean(peers), 2)}x` : "–", `against the best peer (${peers.length} rows)`],
  ];
  document.getElementById("tiles").replaceChildren(
    ...tiles.map(([number, text]) => element("div", { class: "tile" }, element("b", {}, number), element("span", {}, text))),
  );
}
