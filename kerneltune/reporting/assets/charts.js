"use strict";
// The charts: shares of the ceiling, peers, scaling, the gain of tuning, and the speed-up by case.

const timedResults = (cases) =>
  cases.flatMap((c) => Object.entries(c.of).filter(([variant, r]) => r.us != null && !state.hidden.has(variant)).map(([variant, r]) => ({ c, variant, r, shape: c.shape })));
const told = (d) => `${d.variant}  ${d.shape}\n${micros(d.r.us)}, ${Math.round(d.r.gbps)} GB/s${d.r.pct == null ? "" : `, ${fixed(d.r.pct, 1)} % of the ${d.c.bound}`}\n${d.r.config}`;
const ratioTick = (value) => `${+value.toPrecision(3)}x`;

const DIGITS = [[1, 1.5, 2, 3, 5, 7], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]];

/** A logarithmic axis that ends where its values do, with at most `count` ticks at round numbers; `including` is always on it. */
function logAxis(values, count, including) {
  const finite = values.filter((value) => Number.isFinite(value) && value > 0);
  const [low, high] = d3.extent(including == null ? finite : [...finite, including]);
  const room = Math.max(1.01 * (high / low) ** 0.03, Math.sqrt((1.3 * low) / high)); // at least 30 % from end to end
  const domain = [low / room, high * room];
  const powers = d3.range(Math.floor(Math.log10(domain[0])), Math.ceil(Math.log10(domain[1])) + 1);
  const ticksOf = (digits) => powers.flatMap((power) => digits.map((digit) => digit * 10 ** power)).filter((value) => value >= domain[0] && value <= domain[1]);
  const round = DIGITS.map(ticksOf).find((ticks) => ticks.length <= count) ?? ticksOf([1]);
  return { type: "log", domain, ticks: round.length > 1 ? round : d3.ticks(...domain, 2), grid: true };
}

const ruler = document.createElement("canvas").getContext("2d");

/** The room that the longest shape takes in the fonts of the charts, and its tick. */
function shapeMargin(shapes) {
  ruler.font = '12px system-ui, "DejaVu Sans", sans-serif';
  return 14 + Math.ceil(d3.max(shapes, (shape) => ruler.measureText(shape).width));
}
const marked = { fill: "none", stroke: "var(--text)", strokeWidth: 1.5 };
const nearest = (rows, options) => Plot.dot(rows, Plot.pointer({ ...options, ...marked, r: 7.5 }));

function ceilingCards(cases) {
  return grouped(cases).map((group) => {
    const rows = timedResults(group).filter((d) => d.r.pct != null);
    if (!rows.length) return null;
    const shapes = [...new Set(rows.map((d) => d.shape))];
    const variants = data.variants.filter((variant) => rows.some((d) => d.variant === variant));
    const most = Math.max(100, d3.max(rows, (d) => d.r.pct));
    const places = { x: (d) => d.r.pct, y: "variant", fy: "shape" };
    const isLong = shapes.length > 12; // the axis below is out of sight
    const draw = (width) =>
      Plot.plot({
        width, height: 40 + shapes.length * (variants.length * 8 + 10), marginLeft: shapeMargin(shapes), marginTop: isLong ? 34 : 6, marginBottom: 34, marginRight: 18,
        x: { domain: [0, most], grid: true, label: `% of ${bounds(group)} →`, ticks: 5, axis: isLong ? "both" : "bottom" }, y: { axis: null, domain: variants, padding: 0.08 },
        fy: { domain: shapes, label: null, axis: "left", padding: 0.14 }, color: colours(variants),
        marks: [
          Plot.ruleX([100], { stroke: "var(--muted)", strokeDasharray: "3 3" }),
          Plot.barX(rows, { ...places, fill: "variant" }),
          Plot.barX(rows, Plot.pointer({ ...places, ...marked })),
          Plot.ruleX([0], { stroke: "var(--muted)" }),
        ],
      });
    const alt = `Bars: percent of the ${bounds(group)} by shape and variant for ${group[0].title}. The values are in the table below.`;
    return figure(group[0].title, `${axisNames(group[0].axes)}`, alt, draw, told, rows, resultColumns({ [`% of ${bounds(group)}`]: (d) => fixed(d.r.pct, 1) }));
  });
}

const resultColumns = (more) => ({ shape: (d) => d.shape, variant: (d) => d.variant, "time µs": (d) => fixed(d.r.us, 2), ...more, config: (d) => d.r.config });

function peerCards(cases) {
  return grouped(cases).map((group) => {
    const rows = timedResults(group.filter((c) => side(c, state.b)?.us != null)).map((d) => ({ ...d, ratio: d.r.us / side(d.c, state.b).us }));
    const shapes = [...new Set(rows.map((d) => d.shape))];
    const variants = data.variants.filter((variant) => rows.some((d) => d.variant === variant));
    if (variants.length < 2) return null;
    const draw = (width) =>
      Plot.plot({
        width, height: 46 + shapes.length * 24, marginLeft: shapeMargin(shapes), marginTop: 6, marginBottom: 36, marginRight: 20,
        x: { ...logAxis(rows.map((d) => d.ratio), width < 420 ? 4 : 7, 1), label: `time / time of ${state.b} →`, tickFormat: ratioTick },
        y: { domain: shapes, label: null }, color: colours(variants), symbol: symbols(variants),
        marks: [
          Plot.ruleY(shapes, { stroke: "var(--line)" }),
          Plot.ruleX([1], { stroke: "var(--muted)" }),
          Plot.dot(rows, { x: "ratio", y: "shape", stroke: "variant", fill: "variant", fillOpacity: 0.55, symbol: "variant", r: 4.2 }),
          nearest(rows, { x: "ratio", y: "shape" }),
        ],
      });
    const alt = `Dots: time of every variant and peer over the time of ${state.b} by shape for ${group[0].title}.`;
    return figure(group[0].title, axisNames(group[0].axes), alt, draw, (d) => `${told(d)}\n${fixed(d.ratio, 2)}x the time of ${state.b}`, rows, resultColumns({ ratio: (d) => fixed(d.ratio, 3) }));
  });
}

/** Runs of at least three sizes of `axis` with all other axes the same. */
function series(cases, axis) {
  const rest = (c) => Object.entries(c.axes).filter(([name]) => name !== axis).map(([name, size]) => `${name}=${size}`).join(" ");
  return grouped(cases.filter((c) => axis in c.axes)).flatMap((group) =>
    d3.groups(group, rest).filter(([, run]) => new Set(run.map((c) => c.axes[axis])).size > 2).map(([fixedAxes, run]) => ({ fixedAxes, run: d3.sort(run, (c) => c.axes[axis]) })),
  );
}

function scalingCards(cases, axis) {
  return series(cases, axis).map(({ fixedAxes, run }) => {
    const rows = timedResults(run).map((d) => ({ ...d, x: d.c.axes[axis], us: d.r.us }));
    if (!rows.length) return null;
    const variants = data.variants.filter((variant) => rows.some((d) => d.variant === variant));
    const start = rows.find((d) => d.variant === state.b) ?? rows[0];
    const linear = run.map((c) => ({ x: c.axes[axis], us: (start.us * c.axes[axis]) / start.x }));
    const draw = (width) =>
      Plot.plot({
        width, height: 310, marginLeft: 48, marginTop: 28, marginRight: 26, marginBottom: 38,
        x: { type: "log", base: 2, label: `${axis} →`, ticks: [...new Set(rows.map((d) => d.x))], tickFormat: String },
        y: { ...logAxis([...rows, ...linear].map((d) => d.us), 6), label: "↑ µs", tickFormat: "~g" }, color: colours(variants), symbol: symbols(variants),
        marks: [
          Plot.line(linear, { x: "x", y: "us", stroke: "var(--muted)", strokeDasharray: "5 3" }),
          Plot.line(rows, { x: "x", y: "us", z: "variant", stroke: "variant", strokeWidth: 1.6 }),
          Plot.dot(rows, { x: "x", y: "us", stroke: "variant", fill: "variant", symbol: "variant", r: 3.5 }),
          nearest(rows, { x: "x", y: "us" }),
          Plot.text(linear.slice(-1), { x: "x", y: "us", text: ["linear"], dy: -10, textAnchor: "end", fill: "var(--muted)", stroke: "var(--surface)", strokeWidth: 4 }),
        ],
      });
    const alt = `Time against ${axis} with ${fixedAxes} for ${run[0].title}, and the line of linear scaling.`;
    return figure(run[0].title, fixedAxes, alt, draw, told, rows, resultColumns({ [axis]: (d) => d.x }));
  });
}

/** What the cache's evidence says that tuning gained over the default config. */
function evidenceCards(evidence) {
  return d3.groups(evidence, (e) => e.title).map(([title, entries]) => {
    const rows = entries.map((e) => ({ ...e, gain: e.default_us / e.us }));
    const shapes = [...new Set(rows.map((d) => d.shape))];
    const variants = data.variants.filter((variant) => rows.some((d) => d.variant === variant));
    const draw = (width) =>
      Plot.plot({
        width, height: 46 + shapes.length * 20, marginLeft: shapeMargin(shapes), marginTop: 6, marginBottom: 36, marginRight: 20,
        x: { ...logAxis(rows.map((d) => d.gain), width < 420 ? 4 : 7, 1), label: "default's time / tuned time →", tickFormat: ratioTick },
        y: { domain: shapes, label: null }, color: colours(variants), symbol: symbols(variants),
        marks: [
          Plot.ruleY(shapes, { stroke: "var(--line)" }),
          Plot.ruleX([1], { stroke: "var(--muted)" }),
          Plot.dot(rows, { x: "gain", y: "shape", stroke: "variant", fill: "variant", fillOpacity: 0.5, symbol: "variant", r: 4 }),
          nearest(rows, { x: "gain", y: "shape" }),
        ],
      });
    const alt = `Dots: time of the default config over that of the tuned one by shape for ${title}.`;
    const tell = (d) => `${d.variant}  ${d.shape}\n${micros(d.default_us)} → ${micros(d.us)}, ${d.trials} configs tried\n${d.config}`;
    const columns = { shape: (d) => d.shape, variant: (d) => d.variant, "default µs": (d) => fixed(d.default_us, 2), "tuned µs": (d) => fixed(d.us, 2), tried: (d) => d.trials, config: (d) => d.config };
    return figure(title, rows[0] ? axisNames(rows[0].axes) : "", alt, draw, tell, rows, columns);
  });
}

/** The speed-up of every case, a strip for each kind: the first chart of the page. */
function speedupFigure(rows) {
  const timed = rows.filter((row) => row.speedup != null).map((row) => ({ ...row, kind: [row.c.kind, row.c.quant, row.c.dtype.replace("bfloat", "bf").replace("float", "fp")].join(" ") }));
  if (!timed.length) return null;
  const kinds = [...new Set(timed.map((row) => row.kind))];
  const way = { "+": "var(--good)", "-": "var(--bad)", "": "var(--muted)" };
  const draw = (width) =>
    Plot.plot({
      width, height: 52 + kinds.length * 26, marginLeft: shapeMargin(kinds), marginTop: 8, marginBottom: 38, marginRight: 20,
      x: { ...logAxis(timed.map((row) => row.speedup), width < 420 ? 4 : 8, 1), label: "B is so many times as fast as A →", tickFormat: ratioTick },
      y: { domain: kinds, label: null },
      marks: [
        Plot.ruleY(kinds, { stroke: "var(--line)" }),
        Plot.ruleX([1], { stroke: "var(--muted)" }),
        Plot.dot(timed, { x: "speedup", y: "kind", r: 5, fill: (row) => way[row.mark], fillOpacity: 0.55, stroke: (row) => way[row.mark] }),
        Plot.tickX(d3.groups(timed, (row) => row.kind).map(([kind, group]) => ({ kind, mean: geomean(group.map((row) => row.speedup)) })), { x: "mean", y: "kind", stroke: "var(--text)", strokeWidth: 2 }),
        nearest(timed, { x: "speedup", y: "kind" }),
      ],
    });
  const tell = (row) => `${row.c.shape} ${row.c.settings}\nA ${row.a.is ?? state.a} ${micros(row.a.us)}, B ${micros(row.b.us)}: ${fixed(row.speedup, 2)}x`;
  const columns = { kind: (row) => row.kind, shape: (row) => row.c.shape, "A µs": (row) => fixed(row.a.us, 2), "B µs": (row) => fixed(row.b.us, 2), speedup: (row) => fixed(row.speedup, 3) };
  return figure("Speed-up by case", "a dot a case; the bar is the geometric mean", "Dots: how many times as fast as A B is, by kind of case.", draw, tell, timed, columns);
}
