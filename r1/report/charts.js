// Charts as SVG: lines with their smoothed selves, points, stacked areas. One cross-hair and one range for all of them.

const LEFT = 48, RIGHT = 10, TOP = 8, BOTTOM = 22, HEIGHT = 200;
const display = { axis: "step", smooth: 0.5, range: null, hover: null };
const drawn = [];
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Hours of training at a step of a run, between the points that are known. */
function hoursAt(run, step) {
  const { x, y } = DATA.runs[run].clock;
  let i = x.findIndex((value) => value >= step);
  if (i < 0) i = x.length - 1;
  if (i === 0 || x[i] === x[i - 1]) return y[i];
  return y[i - 1] + (y[i] - y[i - 1]) * (step - x[i - 1]) / (x[i] - x[i - 1]);
}

/** An exponential mean that starts without a bias to its first value. */
function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  const found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i++) found.push(+(i * size).toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const found = [];
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const factors = last - first > 2 ? [1] : [1, 2, 5];
  const every = Math.ceil((last - first) / 6);
  for (let power = first; power <= last; power += every) found.push(...factors.map((factor) => factor * 10 ** power));
  return found.filter((value) => value >= low && value <= high);
}

function makeChart(spec) {
  const names = [...new Set(spec.curves.map((curve) => curve.name))];
  const runs = new Set(spec.curves.map((curve) => curve.run));
  const byRun = runs.size > 1 && spec.kind !== "stack";
  // Of names like response/length_mean the first part says what the title says.
  const rooms = new Set(names.map((name) => name.split("/")[0]));
  const label = (name) => {
    const parts = name.split("/");
    if (spec.kind === "points") return [...parts.slice(1, -1), ...(name.includes("@") ? parts.slice(-1) : [])].join(" ");
    if (spec.kind === "stack") return name.replace(/^time\/|_s$/g, "");
    return rooms.size > 1 ? name : parts.slice(1).join("/") || name;
  };
  const chart = { spec, hidden: new Set(), log: spec.scale === "log" };
  chart.curves = spec.curves.map((curve) => ({
    ...curve,
    label: label(curve.name) + (byRun ? ` · ${DATA.runs[curve.run].name}` : ""),
    color: byRun ? runColor(curve.run) : `var(--c${names.indexOf(curve.name) % 8})`,
    dash: byRun ? DASHES[names.indexOf(curve.name) % 4] : "",
  }));
  chart.positive = chart.curves.some((curve) => curve.y.some((y) => y > 0)) && spec.kind !== "stack";
  chart.svg = svg("svg", { role: "img", "aria-label": spec.title });
  chart.legend = el("div", { class: "legend" });
  const caption = el("figcaption", {}, el("b", {}, spec.title), el("span", {}, spec.unit));
  if (chart.positive) {
    const button = el("button", { type: "button", "aria-pressed": String(chart.log), onclick: () => {
      chart.log = !chart.log;
      button.setAttribute("aria-pressed", String(chart.log));
      draw(chart);
    } }, "log");
    caption.append(button);
  }
  chart.values = chart.curves.map(() => el("b"));
  chart.curves.forEach((curve, i) => {
    const button = el("button", { type: "button", title: curve.name, "aria-pressed": "true", onclick: () => {
      if (!chart.hidden.delete(i)) chart.hidden.add(i);
      button.setAttribute("aria-pressed", String(!chart.hidden.has(i)));
      draw(chart);
    } }, el("i", { style: `border-color:${curve.color};border-top-style:${curve.dash ? "dashed" : "solid"}` }), curve.label, chart.values[i]);
    chart.legend.append(button);
  });
  pointer(chart);
  drawn.push(chart);
  return el("figure", { class: "chart" }, caption, chart.svg, chart.legend);
}

/** The curves as they are to be drawn: in the axis' unit, within the range, smoothed, stacked. */
function prepare(chart) {
  const stack = chart.spec.kind === "stack";
  let base = null;
  return chart.curves.map((curve, i) => {
    const x = display.axis === "hours" ? curve.x.map((step) => hoursAt(curve.run, step)) : curve.x;
    const smooth = chart.spec.kind === "line" && display.smooth > 0 && curve.y.length > 2;
    let y = smooth ? smoothed(curve.y, display.smooth) : curve.y;
    let below = null;
    if (stack) {
      below = base || y.map(() => 0);
      y = chart.hidden.has(i) ? below : below.map((value, k) => value + curve.y[k]);
      base = y;
    }
    return { ...curve, x, y, below, raw: curve.y, smooth, hidden: chart.hidden.has(i) };
  });
}

function domain(chart, curves) {
  const shown = curves.filter((curve) => !curve.hidden);
  const xs = shown.flatMap((curve) => curve.x);
  const [x0, x1] = display.range || (xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1]);
  const ys = shown.flatMap((curve) => (curve.smooth ? [...curve.y, ...curve.raw] : curve.y)
    .filter((y, i) => { const x = curve.x[i % curve.x.length]; return x >= x0 && x <= x1 && (!chart.log || y > 0); }));
  let [y0, y1] = ys.length ? [Math.min(...ys), Math.max(...ys)] : [chart.log ? 0.1 : 0, 1];
  if (chart.spec.kind === "stack") y0 = 0;
  if (chart.log) return { x0, x1, y0: y0 / 1.2, y1: y1 * 1.2 };
  // Rounding in the smoothed values of a constant is no range.
  const room = y1 - y0 > Math.abs(y1) * 1e-9 ? (y1 - y0) * 0.06 : Math.abs(y1) * 0.1 || 1;
  // A quantity that is never negative starts no lower than 0, and at 0 when it comes near.
  const floor = y0 >= 0 && y0 < (y1 - y0) * 0.5 ? 0 : y0 - room;
  return { x0, x1, y0: chart.spec.kind === "stack" ? 0 : y0 >= 0 ? Math.max(0, floor) : floor, y1: y1 + room };
}

function draw(chart) {
  const width = chart.svg.clientWidth || 400;
  const curves = prepare(chart);
  const { x0, x1, y0, y1 } = domain(chart, curves);
  const across = (x) => LEFT + (x - x0) / (x1 - x0 || 1) * (width - LEFT - RIGHT);
  const level = (y) => chart.log ? Math.log(y / y0) / Math.log(y1 / y0) : (y - y0) / (y1 - y0);
  const up = (y) => HEIGHT - BOTTOM - level(y) * (HEIGHT - TOP - BOTTOM);
  Object.assign(chart, { width, across, prepared: curves, x0, x1 });
  const clip = `clip${drawn.indexOf(chart)}`;
  const parts = [svg("clipPath", { id: clip },
    svg("rect", { x: LEFT, y: TOP - 2, width: Math.max(0, width - LEFT - RIGHT), height: HEIGHT - TOP - BOTTOM + 4 }))];
  for (const y of chart.log ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
    parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: up(y), y2: up(y) }),
      svg("text", { x: LEFT - 6, y: up(y) + 4, "text-anchor": "end" }, number(y)));
  }
  for (const x of ticks(x0, x1, Math.max(2, width / 90))) {
    parts.push(svg("text", { x: across(x), y: HEIGHT - 6, "text-anchor": "middle" }, number(x)));
  }
  const plot = svg("g", { "clip-path": `url(#${clip})` });
  for (const curve of curves.filter((c) => !c.hidden)) plot.append(...strokes(chart, curve, across, up));
  chart.marks = svg("g", {});
  chart.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  chart.svg.replaceChildren(...parts, plot, chart.marks);
  mark(chart);
}

function strokes(chart, curve, across, up) {
  const path = (ys, xs = curve.x) => {
    let text = "", pen = "M";
    ys.forEach((y, i) => {
      if (chart.log && !(y > 0)) { pen = "M"; return; }
      text += `${pen}${across(xs[i]).toFixed(1)} ${up(y).toFixed(1)}`;
      pen = "L";
    });
    return text;
  };
  const closed = (top, bottom) => path(top) + path([...bottom].reverse(), [...curve.x].reverse()).replace("M", "L") + "Z";
  const style = `stroke:${curve.color};stroke-dasharray:${curve.dash || "none"}`;
  if (chart.spec.kind === "stack") return [svg("path", { class: "area", d: closed(curve.y, curve.below), style: `fill:${curve.color}` })];
  const found = [];
  if (curve.low && !chart.log) found.push(svg("path", { class: "band", d: closed(curve.high, curve.low), style: `fill:${curve.color}` }));
  if (curve.smooth) found.push(svg("path", { class: "raw", d: path(curve.raw), style }));
  found.push(svg("path", { class: "curve", d: path(curve.y), style }));
  if (chart.spec.kind === "points" || curve.x.length === 1) {
    curve.x.forEach((x, i) => {
      if (!chart.log || curve.y[i] > 0) found.push(svg("circle", { cx: across(x), cy: up(curve.y[i]), r: 3, style: `fill:${curve.color}` }));
    });
  }
  return found;
}

/** The cross-hair, and beside each name its value there; without a cross-hair its latest value. */
function mark(chart) {
  const at = display.hover;
  chart.marks.replaceChildren();
  if (at != null && at >= chart.x0 && at <= chart.x1) {
    const x = chart.across(at);
    chart.marks.append(svg("line", { class: "cross", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    const left = x > chart.width - 90;
    chart.marks.append(svg("text", { x: x + (left ? -5 : 5), y: TOP + 9, "text-anchor": left ? "end" : "start" },
      `${display.axis} ${number(display.axis === "step" ? Math.round(at) : at)}`));
  }
  if (display.brush) {
    const [a, b] = display.brush.map(chart.across).sort((p, q) => p - q);
    chart.marks.append(svg("rect", { class: "brush", x: a, width: b - a, y: TOP, height: HEIGHT - TOP - BOTTOM }));
  }
  chart.prepared.forEach((curve, i) => {
    const nearest = at == null ? curve.x.length - 1
      : curve.x.reduce((best, x, k) => Math.abs(x - at) < Math.abs(curve.x[best] - at) ? k : best, 0);
    chart.values[i].textContent = number(curve.raw[nearest]);
  });
}

let waiting = false;
function markAll() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; drawn.forEach(mark); });
}

/** Hovering moves the cross-hair of every chart; dragging with a mouse chooses a range, a double click gives it up. */
function pointer(chart) {
  const place = (event) => {
    const box = chart.svg.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width * chart.width - LEFT) / (chart.width - LEFT - RIGHT);
    return chart.x0 + Math.min(1, Math.max(0, share)) * (chart.x1 - chart.x0);
  };
  chart.svg.addEventListener("pointermove", (event) => {
    display.hover = place(event);
    if (display.brush) display.brush[1] = display.hover;
    markAll();
  });
  chart.svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button !== 0) return;
    display.brush = [place(event), place(event)];
    chart.svg.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  chart.svg.addEventListener("pointerup", () => {
    const [a, b] = (display.brush || [0, 0]).sort((p, q) => p - q);
    display.brush = null;
    if (b - a > (chart.x1 - chart.x0) * 0.02) setRange([a, b]);
    markAll();
  });
  chart.svg.addEventListener("pointerleave", () => { display.hover = null; markAll(); });
  chart.svg.addEventListener("dblclick", () => setRange(null));
}

function setRange(range) {
  display.range = range;
  document.getElementById("whole").hidden = range == null;
  drawn.forEach(draw);
}

/** What never changed, in words. */
function constants(specs) {
  const names = new Map();
  for (const curve of specs.flatMap((spec) => spec.curves)) {
    names.set(curve.name, [...(names.get(curve.name) || []), number(curve.y[0])]);
  }
  const texts = [...names].map(([name, values]) => el("span", {}, name + " ", el("b", {}, [...new Set(values)].join(" / "))));
  return el("p", { class: "constants" }, "The same at every step: ", ...texts);
}

/** Draw every section's charts; returns the controls for the bar. */
function charts() {
  Object.assign(display, memory.get("sessionStorage", "display"));
  for (const { title, charts: specs, flat } of DATA.sections) {
    section(title, el("div", { class: "charts" }, ...specs.map(makeChart)), flat.length ? constants(flat) : null);
  }
  const again = () => {
    memory.set("sessionStorage", "display", { axis: display.axis, smooth: display.smooth });
    drawn.forEach(draw);
  };
  const axis = el("select", { onchange: () => { display.axis = axis.value; setRange(null); again(); } },
    el("option", { value: "step" }, "steps"), el("option", { value: "hours" }, "hours"));
  axis.value = display.axis;
  const smooth = el("input", { type: "range", min: 0, max: 0.98, step: 0.02,
    oninput: () => { display.smooth = +smooth.value; again(); } });
  smooth.value = display.smooth;
  const whole = el("button", { type: "button", id: "whole", hidden: true, onclick: () => setRange(null) }, "whole range");
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) draw(drawn.find((chart) => chart.svg === target));
  });
  drawn.forEach((chart) => { draw(chart); observer.observe(chart.svg); });
  return [whole, el("label", {}, "over", axis), el("label", {}, "smooth", smooth)];
}
