"use strict";
// Training curves: the loss at every step, how far it is from the first curve's, where all ends, and where it comes from.

const signed = (fraction) => `${fraction < 0 ? "−" : "+"}${fixed(Math.abs(100 * fraction), 2)} %`;

/** The first curve is broad and pale, so that those that lie on it are seen; then come solid and dashed lines. */
function curveLook(index) {
  if (!index) return { stroke: "var(--c0)", strokeWidth: 5, strokeOpacity: 0.5 };
  return { stroke: `var(--c${[2, 5, 3, 4, 6, 1, 7][(index - 1) % 7]})`, strokeWidth: 1.5, strokeDasharray: index % 2 ? null : "5 3" };
}

function curveMark(index) {
  const { stroke, strokeWidth, strokeOpacity, strokeDasharray } = curveLook(index);
  const icon = d3.create("svg").attr("class", "stroke").attr("viewBox", "0 0 26 8").attr("aria-hidden", "true");
  icon.append("path").attr("d", "M0 4H26").attr("stroke", stroke).attr("stroke-width", strokeWidth).attr("stroke-opacity", strokeOpacity ?? null).attr("stroke-dasharray", strokeDasharray);
  return icon.node();
}

/** Where all ends, which line is whose, and where the numbers come from. */
function finalCard(found) {
  const head = ["", found.loss, found.curves.length > 1 ? `to ${found.curves[0].name}` : ""].map((text, i) => element("th", { scope: "col", class: i ? "num" : null }, text));
  const lines = found.curves.map((curve, index) => {
    const cells = [fixed(curve.final, 4), index ? signed(curve.difference) : ""].map((text) => element("td", { class: "num" }, text));
    return element("tr", {}, element("td", {}, curveMark(index), curve.name), ...cells);
  });
  const table = element("table", {}, element("thead", { class: "plain" }, element("tr", {}, ...head)), element("tbody", {}, ...lines));
  const facts = Object.entries(found.facts).map(([name, text]) => element("div", { class: name === "command" || name === "file" ? "wide" : null }, element("dt", {}, name), element("dd", {}, text)));
  const heading = element("h3", {}, "Final losses", element("small", {}, `mean of the last ${found.last} steps`));
  return element("figure", { class: "finals" }, element("figcaption", {}, heading), table, element("dl", { class: "facts" }, ...facts));
}

function curveFigure(found, title, label, value, show) {
  const base = found.curves[0];
  const rows = found.curves.flatMap((curve, index) => curve.losses.map((loss, i) => ({ step: found.steps[i], name: curve.name, index, loss, value: value(loss, base.losses[i]) })));
  const draw = (width) =>
    Plot.plot({
      width, height: 290, marginLeft: 52, marginTop: 28, marginRight: 18, marginBottom: 38,
      x: { label: "step →", grid: true, ticks: width < 420 ? 5 : 8 }, y: { label: `↑ ${label}`, grid: true },
      marks: [
        ...found.curves.map((curve, index) => Plot.line(rows.filter((row) => row.index === index), { x: "step", y: "value", ...curveLook(index) })),
        Plot.dot(rows, Plot.pointerX({ x: "step", y: "value", maxRadius: Infinity, ...marked, r: 6 })),
      ],
    });
  const alt = `${title} over ${found.steps.length} points for ${found.curves.map((curve) => curve.name).join(", ")}: ${found.title}. The final losses are in the table beside it.`;
  const byStep = found.steps.map((step, i) => ({ step, at: found.curves.map((curve) => curve.losses[i]) }));
  const columns = Object.fromEntries(found.curves.map((curve, index) => [curve.name, (d) => show(value(d.at[index], d.at[0]))]));
  const note = found.window > 1 ? `a point is the mean of ${found.window} steps` : "";
  return figure(title, note, alt, draw, (d) => `${d.name}, step ${d.step}\n${fixed(d.loss, 4)} ${found.loss}\n${show(d.value)}`, byStep, { step: (d) => d.step, ...columns });
}

function curvesSection() {
  if (!data.curves.length) return null;
  const parts = data.curves.map((found) => {
    const base = found.curves[0].name;
    const loss = curveFigure(found, "Loss", found.loss, (loss) => loss, (loss) => fixed(loss, 4));
    const difference = curveFigure(found, `Difference to ${base}`, "%", (loss, first) => 100 * (loss / first - 1), (percent) => signed(percent / 100));
    return element("div", { class: "training" }, element("h3", {}, found.title), cards([finalCard(found), loss, found.curves.length > 1 ? difference : null]));
  });
  return section("curves", "Training curves", "What a model's loss was at every step, under each of the recipes that are compared.", ...parts);
}
