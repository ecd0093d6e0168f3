"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const DEGREES = 180 / Math.PI;

// mathematics. The angles of the table are samples of the library's, joined by cubics

function theta(row, beta) {
  const { ends, values } = row, size = Math.min(Math.abs(beta), data.largestBeta);
  let low = 0, high = ends.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (ends[middle] <= size) low = middle; else high = middle - 1;
  }
  const u = 3 * (size - ends[low]) / (ends[low + 1] - ends[low]), at = 3 * low;
  const angle = -values[at] * (u - 1) * (u - 2) * (u - 3) / 6 + values[at + 1] * u * (u - 2) * (u - 3) / 2
    - values[at + 2] * u * (u - 1) * (u - 3) / 2 + values[at + 3] * u * (u - 1) * (u - 2) / 6;
  return beta < 0 ? -angle : angle;
}

const positionP = k => k / (data.positions - k);

function familyTheta(p, beta) {
  if (p === 0) return 0;
  return p === Infinity ? beta : p * Math.atan(beta / p);
}

function familyCap(position) {
  return data.familyCaps.filter(([first]) => first <= position).pop()[1];
}

const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
const norm = a => Math.sqrt(dot(a, a));

// z is the part of f along the sphere through h; the next state is h turned towards z
function turn(h, f, alpha, angle, cap) {
  const hh = dot(h, h), c = dot(h, f) / hh, z = f.map((x, i) => x - c * h[i]), length = norm(z), radius = Math.sqrt(hh);
  const beta = alpha * length / radius, full = angle(beta);
  const turned = cap === null ? full : Math.min(full, cap), along = length ? radius * Math.sin(turned) / length : 0;
  return { beta, angle: turned, outwards: c * radius, state: h.map((x, i) => Math.cos(turned) * x + along * z[i]) };
}

// numbers in [0, 1) that depend on the seed alone: mulberry32
function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}

// the first state, of length 1, and the updates of all sublayers
function updates(seed, size) {
  const next = random(seed), { sublayers, dimensions } = data.journey;
  const direction = length => {
    const x = Array.from({ length: dimensions }, () => 2 * next() - 1), scale = length / norm(x);
    return x.map(value => value * scale);
  };
  return { start: direction(1), branches: Array.from({ length: sublayers }, () => direction(size)) };
}

// the lengths of all states and the angles of all steps, if the updates are added and if they turn
function journey({ start, branches }, angle, cap) {
  const added = { norms: [norm(start)], angles: [] }, turned = { norms: [norm(start)], angles: [], updates: [] };
  let sum = start, state = start;
  for (const f of branches) {
    const length = norm(sum), outwards = dot(sum, f) / length, along = norm(f.map((x, i) => x - outwards / length * sum[i]));
    added.angles.push(Math.atan2(along, length + outwards));
    sum = sum.map((x, i) => x + f[i]);
    added.norms.push(norm(sum));
    const step = turn(state, f, 1, angle, cap);
    turned.angles.push(step.angle);
    turned.updates.push([step.beta * norm(state), step.outwards]);
    state = step.state;
    turned.norms.push(norm(state));
  }
  return { added, turned };
}

// settings

const START = [1.35, 0.4], AXES = [0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 4, 5, 6, data.largestBeta];
const settings = { f: START.slice() };

function read() {
  const position = Number($("p").value), mode = $("cap").value, ownCap = Number($("cap-angle").value) / DEGREES;
  const capOf = automatic => ({ auto: automatic, none: null, own: ownCap })[mode];
  const p = positionP(position);
  settings.alpha = Number($("alpha").value);
  settings.contestants = data.retractions.map((row, index) => ({
    key: row.name, name: row.name, formula: row.formula, cap: capOf(row.cap), angle: beta => theta(row, beta), ...look("retraction", index),
  }));
  settings.contestants.push({
    key: "own", name: `p = ${number(p)}`, formula: "p arctan(beta/p)", cap: capOf(familyCap(position)),
    angle: beta => familyTheta(p, beta), colour: "var(--ink)", lap: 1,
  });
  settings.played = Number($("played").value);
  settings.size = Number($("size").value) / 100;
  settings.axis = AXES[Number($("axis").value)];
  settings.tolerance = 10 ** (Number($("tolerance").value) / 10);
  settings.layers = Number($("depth").value);
  settings.eta = Number($("eta").value) / 100;
  $("cap-angle").disabled = mode !== "own";
  show("p", number(p));
  show("alpha", settings.alpha.toFixed(2));
  show("cap-angle", `${$("cap-angle").value}°`);
  show("axis", number(settings.axis));
  show("tolerance", `${number(settings.tolerance)}°`);
  show("depth", `${data.layers[settings.layers]} layers, ${2 * data.layers[settings.layers]} sublayers`);
  show("eta", settings.eta.toFixed(2));
  show("played", settings.played);
  show("size", settings.size.toFixed(2));
}

// one colour per thing in all pictures: the kinds share none, and within a kind the dashes tell further rows apart
const look = (kind, index) => {
  const count = data.colours[kind];
  return { colour: `var(--${kind}-${index % count})`, lap: Math.floor(index / count) % 3 };
};
const ADDING = { name: "adding", ...look("adding", 0) };
const chosenRetraction = id => settings.contestants.find(one => one.key === $(id).value);

const show = (id, text) => { $(`${id}-value`).textContent = text; };
const number = x => x === Infinity ? "∞" : x === 0 ? "0" : String(Number(x.toPrecision(x < 0.1 ? 2 : 3)));
const degrees = angle => `${(angle * DEGREES).toFixed(1)}°`;
const capped = (one, beta) => one.cap === null ? one.angle(beta) : Math.min(one.angle(beta), one.cap);

// drawing. Strings from runs and tables are set as text only

function node(name, attributes = {}, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

function cells(row, texts) {
  texts.forEach((text, index) => {
    const cell = row.appendChild(document.createElement(index ? "td" : "th"));
    if (text instanceof Node) cell.append(text); else cell.textContent = text;
    if (!index) cell.scope = "row";
  });
  return row;
}

function named(one) {
  const all = document.createDocumentFragment(), swatch = document.createElement("span");
  swatch.className = `swatch lap${one.lap}`;
  swatch.style.borderTopColor = one.colour;
  all.append(swatch, one.name);
  return all;
}

const line = points => "M" + points.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L");
const many = (count, from, to) => Array.from({ length: count + 1 }, (_, i) => from + (to - from) * i / count);
const curve = (one, d, more = "") =>
  node("path", { d, class: `curve lap${one.lap} ${more}`, style: `stroke:${one.colour}` });

// ticks at 1, 2 or 5 times a power of ten
function ticks(largest, count) {
  const rough = largest / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough);
  return Array.from({ length: Math.floor(largest / step + 1e-9) + 1 }, (_, i) => i * step);
}

// an empty plot in the pixels of the page, so that its text has the same size on every screen
function plot(svg, height, x, y, xName, yName) {
  const width = svg.clientWidth, left = 46, right = 12, top = 18, bottom = xName ? 36 : 4;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  svg.replaceChildren();
  const log = range => range.log ? Math.log : value => value;
  const scale = (range, from, to) => value =>
    from + (to - from) * (log(range)(value) - log(range)(range.from)) / (log(range)(range.to) - log(range)(range.from));
  const X = scale(x, left, width - right), Y = scale(y, height - bottom, top);
  for (const tick of y.ticks) {
    svg.append(node("path", { class: "grid", d: line([[left, Y(tick)], [width - right, Y(tick)]]) }));
    svg.append(node("text", { x: left - 6, y: Y(tick) + 4, "text-anchor": "end" }, y.text(tick)));
  }
  for (const tick of x.ticks)
    svg.append(node("text", { x: X(tick), y: height - bottom + 16, "text-anchor": "middle" }, number(tick)));
  if (xName) {
    svg.append(node("path", { class: "axis", d: line([[left, Y(y.from)], [width - right, Y(y.from)]]) }));
    svg.append(node("text", { x: width - right, y: height - 4, "text-anchor": "end" }, xName));
  }
  svg.append(node("text", { x: 4, y: 10 }, yName));
  return { X, Y, left, right: width - right, width };
}

// adding beside turning

// flat, with true lengths and angles: from the top, all steps clockwise
function flat({ norms, angles }) {
  let sum = 0;
  const ways = [0, ...angles.map(angle => sum += angle)];
  return { ways, points: ways.map((way, l) => [norms[l] * Math.sin(way), norms[l] * Math.cos(way)]) };
}

function drawJourney() {
  const one = chosenRetraction("turn-retraction"), all = journey(updates(Number($("seed").value), settings.size), one.angle, one.cap);
  const now = settings.played, sides = [["adding", ADDING, all.added], ["turning", { ...one, name: "turning" }, all.turned]];
  // both sides have the same scale and the same centre: the drawing of both fits, and so does the circle
  const points = [[-1, -1], [1, 1], ...flat(all.added).points], ends = [0, 1].map(i => points.map(point => point[i]));
  const view = { left: Math.min(...ends[0]), right: Math.max(...ends[0]), bottom: Math.min(...ends[1]), top: Math.max(...ends[1]) };
  for (const [id, style, path] of sides) {
    $(`${id}-swatch`).className = `swatch lap${style.lap}`;
    $(`${id}-swatch`).style.borderTopColor = style.colour;
    drawPath($(id), style, path, view, now);
  }
  drawOverDepth($("norms"), sides.map(([, style, path]) => [style, path.norms.map((value, l) => [l, value])]), now, "length of h", number);
  drawOverDepth($("turns"), sides.map(([, style, path]) => [style, path.angles.map((value, l) => [l + 1, value * DEGREES])]), now,
    "turn of the sublayer", tick => `${number(tick)}°`);
  $("journey").tBodies[0].replaceChildren();
  for (const [, style, { norms, angles }] of sides)
    cells($("journey").tBodies[0].insertRow(), [named(style), norms[now].toFixed(2), degrees(angles[0]), now ? degrees(angles[now - 1]) : "–"]);
}

// the states so far
function drawPath(svg, one, path, { left, right, bottom, top }, now) {
  // room for the name of f
  const width = svg.clientWidth, height = Math.min(width, 300), room = 24, { ways, points } = flat(path);
  const scale = Math.min((width - 2 * room) / (right - left), (height - 2 * room) / (top - bottom));
  const at = ([x, y]) => [width / 2 + scale * (x - (left + right) / 2), height / 2 - scale * (y - (bottom + top) / 2)], centre = at([0, 0]);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  const state = at(points[now]), pieces = [node("circle", { class: "sphere", cx: centre[0], cy: centre[1], r: scale })];
  // a turn follows the circle; a sum goes straight, and its way is the update itself
  const way = path.updates
    ? many(Math.max(1, 12 * now), 0, ways[now]).map(angle => at([Math.sin(angle), Math.cos(angle)])) : points.slice(0, now + 1).map(at);
  pieces.push(curve(one, line(way)));
  points.slice(0, now + 1).forEach((point, l) => {
    const [x, y] = at(point), age = Math.max(0.25, 1 - 0.05 * (now - l));
    pieces.push(node("circle", { cx: x, cy: y, r: 3.5, style: `fill:${one.colour};opacity:${age}` }));
  });
  if (now) {
    const from = at(points[now - 1]), last = ways[now - 1], [along, outwards] = path.updates ? path.updates[now - 1] : [0, 0];
    const tip = path.updates ? at([points[now - 1][0] + along * Math.cos(last) + outwards * Math.sin(last),
      points[now - 1][1] - along * Math.sin(last) + outwards * Math.cos(last)]) : state;
    pieces.push(node("path", { class: "vector", d: line([from, tip]) }), node("text", { class: "name", ...beside(tip, from) }, "f"));
  }
  pieces.push(node("path", { class: "vector", d: line([centre, state]) }), node("circle", { cx: centre[0], cy: centre[1], r: 3, style: "fill:var(--ink)" }),
    node("circle", { cx: state[0], cy: state[1], r: 5.5, style: `fill:${one.colour};stroke:var(--card);stroke-width:1.5` }));
  // on the side where the state goes next, which is free
  const [x, y] = at([points[now][0] / 2, points[now][1] / 2]), angle = ways[now];
  pieces.push(node("text", { class: "name", x: x + 10 * Math.cos(angle), y: y + 10 * Math.sin(angle) + 4, "text-anchor": "middle" }, "h"));
  svg.replaceChildren(...pieces);
}

// a place for the name of an arrow, a little beyond its tip
function beside(tip, from) {
  const length = Math.hypot(tip[0] - from[0], tip[1] - from[1]) || 1;
  return { x: tip[0] + 11 * (tip[0] - from[0]) / length, y: tip[1] + 11 * (tip[1] - from[1]) / length + 4, "text-anchor": "middle" };
}

// one curve per side over the sublayers; what is not played yet is faint
function drawOverDepth(svg, curves, now, name, text) {
  const largest = 1.1 * Math.max(...curves.flatMap(([, points]) => points.map(([, y]) => y))), count = data.journey.sublayers;
  const { X, Y } = plot(svg, 190, { from: 0, to: count, ticks: many(4, 0, count) }, { from: 0, to: largest, ticks: ticks(largest, 4), text }, "sublayer", name);
  for (const [one, points] of curves) {
    const places = points.map(([x, y]) => [X(x), Y(y)]), played = places.filter((_, index) => points[index][0] <= now);
    svg.append(curve(one, line(places), "ahead"));
    if (!played.length) continue;
    const [x, y] = played[played.length - 1];
    svg.append(curve(one, line(played)), node("circle", { cx: x, cy: y, r: 4.5, style: `fill:${one.colour}` }));
  }
}

let playing = null;

function pause() {
  clearInterval(playing);
  playing = null;
  $("play").textContent = "Play";
}

function play() {
  if (settings.played === data.journey.sublayers) playTo(0);
  playing = setInterval(() => {
    playTo(settings.played + 1);
    if (settings.played === data.journey.sublayers) pause();
  }, 200);
  $("play").textContent = "Pause";
}

function playTo(sublayer) {
  $("played").value = sublayer;
  read();
  later(drawJourney);
}

// the circle

const VIEW = { x: 2.1, top: 1.75, bottom: -1.12 };
let unit = 1;
const toX = x => (VIEW.x + x) * unit, toY = y => (VIEW.top - y) * unit;
// a name that starts here is not cut
const within = x => Math.max(0, Math.min(2 * VIEW.x * unit - 22, x));

function drawTurn() {
  const svg = $("turn"), held = document.activeElement === $("handle");
  const width = svg.clientWidth, height = width * (VIEW.top - VIEW.bottom) / (2 * VIEW.x);
  unit = width / (2 * VIEW.x);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  const moving = node("g", { id: "moving" });
  const handle = node("g", { id: "handle", tabindex: 0, role: "slider", "aria-label": "update f", "aria-valuemin": 0,
    "aria-valuemax": 2 });
  handle.append(node("circle", { class: "area", r: 24 }), node("circle", { class: "ring", r: 15 }),
    node("circle", { class: "tip", r: 9 }));
  svg.replaceChildren(
    node("circle", { class: "sphere", cx: toX(0), cy: toY(0), r: unit }),
    node("path", { class: "tangent", d: line([[0, toY(1)], [width, toY(1)]]) }),
    node("path", { class: "vector", d: line([[toX(0), toY(0)], [toX(0), toY(1)]]) }),
    node("circle", { cx: toX(0), cy: toY(0), r: 3, style: "fill:var(--ink)" }),
    moving, handle, node("circle", { cx: toX(0), cy: toY(1), r: 5, style: "fill:var(--ink)" }),
    node("text", { class: "name", x: toX(0) - 18, y: toY(1) - 10 }, "h"));
  if (held) handle.focus();
  moveTurn();
}

function moveTurn() {
  const [x, y] = settings.f, moving = $("moving"), handle = $("handle"), pieces = [];
  const tip = [toX(x), toY(1 + y)], reach = toX(settings.alpha * x);
  pieces.push(node("path", { class: "along", d: line([[toX(0), toY(1)], [reach, toY(1)]]) }),
    node("path", { class: "tangent", d: line([tip, [tip[0], toY(1)]]) }),
    node("path", { class: "vector", d: line([[toX(0), toY(1)], tip]) }),
    node("text", { class: "name", x: within(tip[0] + 14), y: Math.max(13, tip[1] - 10) }, "f"));
  if (Math.abs(reach - toX(0)) > 30)
    pieces.push(node("text", { class: "name", x: within(reach + (x < 0 ? -26 : 8)), y: toY(1) + 17 }, "αz"));
  let beta = 0;
  settings.contestants.forEach((one, index) => {
    const result = turn([0, 1], [x, y], settings.alpha, one.angle, one.cap), radius = 1 - 0.075 * (index + 1);
    const [sx, sy] = result.state, angles = many(48, 0, Math.sign(x) * result.angle);
    beta = result.beta;
    pieces.push(curve(one, line(angles.map(a => [toX(radius * Math.sin(a)), toY(radius * Math.cos(a))]))),
      node("path", { d: line([[toX(radius * sx), toY(radius * sy)], [toX(sx), toY(sy)]]), style: `stroke:${one.colour}` }),
      node("circle", { cx: toX(sx), cy: toY(sy), r: 6, style: `fill:${one.colour};stroke:var(--card);stroke-width:1.5` }));
  });
  moving.replaceChildren(...pieces);
  handle.setAttribute("transform", `translate(${tip[0]} ${tip[1]})`);
  handle.setAttribute("aria-valuenow", beta.toFixed(3));
  handle.setAttribute("aria-valuetext", `${x.toFixed(2)} along the sphere, ${y.toFixed(2)} outwards, beta ${beta.toFixed(2)}`);
  settings.beta = beta;
  moveMark();
}

// the curves

let anglePlot = null;

function drawAngle() {
  const top = Math.max(...settings.contestants.map(one => capped(one, settings.axis))) * DEGREES;
  const largest = Math.min(180, Math.max(top * 1.08, 0.5)), step = [1, 5, 15, 30, 45].find(s => largest / s <= 6.5) || 45;
  const yTicks = largest < 4 ? ticks(largest, 4) : many(Math.floor(largest / step), 0, step * Math.floor(largest / step));
  const svg = $("angle");
  anglePlot = plot(svg, 320, { from: 0, to: settings.axis, ticks: ticks(settings.axis, 5) },
    { from: 0, to: largest, ticks: yTicks, text: tick => `${number(tick)}°` }, "β", "θ(β)");
  const { X, Y } = anglePlot, betas = many(160, 0, settings.axis);
  drawSteps(svg, X, Y(0));
  for (const one of settings.contestants) {
    const seen = betas.filter(beta => one.angle(beta) * DEGREES <= largest);
    if (one.cap !== null) svg.append(curve(one, line(seen.map(b => [X(b), Y(one.angle(b) * DEGREES)])), "uncapped"));
    svg.append(curve(one, line(betas.filter(b => capped(one, b) * DEGREES <= largest).map(b => [X(b), Y(capped(one, b) * DEGREES)]))));
  }
  anglePlot.marks = svg.appendChild(node("g", { "pointer-events": "none" }));
  moveMark();
}

// the values under the pointer or, without one, at the step of the vector
function moveMark(beta = settings.beta) {
  if (!anglePlot) return;
  const { X, Y } = anglePlot, marks = [], table = $("readings");
  if (beta <= settings.axis) {
    marks.push(node("path", { class: "guide", d: line([[X(beta), Y(0)], [X(beta), 18]]) }));
    for (const one of settings.contestants)
      marks.push(node("circle", { cx: X(beta), cy: Y(capped(one, beta) * DEGREES), r: 4.5, style: `fill:${one.colour}` }));
  }
  anglePlot.marks.replaceChildren(...marks);
  table.tHead.rows[0].cells[2].textContent = `at β = ${beta.toFixed(2)}`;
  settings.contestants.forEach((one, index) => {
    const held = one.cap !== null && one.angle(beta) > one.cap ? " (cap)" : "";
    table.tBodies[0].rows[index].cells[2].textContent = degrees(capped(one, beta)) + held;
  });
}

// runs: how long their steps are

function chosenRun() {
  if (!data.runs.length) return null;
  const run = data.runs[Number($("run").value)], sublayer = Number($("sublayer").value);
  const chosen = sublayer ? [run.sublayers[sublayer - 1]] : run.sublayers;
  const counts = data.edges.slice(1).map((_, bin) => chosen.reduce((sum, s) => sum + s.counts[bin], 0));
  return { run, sublayer, chosen, counts, total: counts.reduce((a, b) => a + b, 0) };
}

const densities = counts => counts.map((count, bin) => count / (data.edges[bin + 1] - data.edges[bin]));

function drawSteps(svg, X, ground) {
  const chosen = chosenRun();
  if (!chosen) return;
  const high = densities(chosen.counts), seen = high.filter((_, bin) => data.edges[bin] < settings.axis);
  const scale = 110 / Math.max(...seen, 1e-300);
  const bars = high.map((value, bin) => {
    const from = X(data.edges[bin]), to = X(Math.min(data.edges[bin + 1], settings.axis));
    return value && to > from ? `M${from} ${ground}V${ground - value * scale}H${to}V${ground}Z` : "";
  });
  svg.append(node("path", { class: "steps", d: bars.join("") }));
}

function drawHeat() {
  const chosen = chosenRun();
  if (!chosen) return;
  const { run, sublayer } = chosen, rows = run.sublayers.length, height = Math.max(70, Math.min(220, 8 * rows)) + 26;
  const { X, Y, left, right } = plot($("heat"), height, { from: 0, to: settings.axis, ticks: [] },
    { from: rows + 0.5, to: 0.5, ticks: ticks(rows, 4).map(t => Math.max(1, Math.round(t))), text: String }, "", "sublayer");
  const shades = Array.from({ length: 10 }, () => "");
  run.sublayers.forEach((s, index) => {
    const high = densities(s.counts), most = Math.max(...high);
    high.forEach((value, bin) => {
      const from = X(data.edges[bin]), to = Math.min(X(data.edges[bin + 1]), right), shade = Math.min(9, Math.ceil(10 * value / most) - 1);
      if (shade >= 0 && to > from) shades[shade] += `M${from.toFixed(1)} ${Y(index + 0.5)}H${to.toFixed(1)}V${Y(index + 1.5)}H${from.toFixed(1)}Z`;
    });
  });
  shades.forEach((d, shade) => $("heat").append(node("path", { d, style: `fill:var(--steps);opacity:${(shade + 1) / 10}` })));
  if (sublayer) $("heat").append(node("rect", { x: left, width: right - left, y: Y(sublayer - 0.5),
    height: Y(sublayer + 0.5) - Y(sublayer - 0.5), style: "fill:none;stroke:var(--ink);stroke-width:1.5" }));
  const one = sublayer ? run.sublayers[sublayer - 1] : null;
  show("sublayer", one ? `${sublayer}, ${one.branch}` : "all");
  const kind = run.sublayers[0].retraction === null
    ? "Its update is no retraction: β is the step of the projection that turns the state as far."
    : `Its retraction is ${run.sublayers[0].retraction}.`;
  const which = one ? `sublayer ${sublayer} has the median step ${number(one.median)}` + (one.alpha === null ? "" : ` at α = ${number(one.alpha)}`)
    : `median steps from ${number(Math.min(...run.sublayers.map(s => s.median)))} to ${number(Math.max(...run.sublayers.map(s => s.median)))}`;
  $("run-reading").textContent = `${run.run} (${run.scheme}) at step ${run.checkpoint}, ${run.tokens.toLocaleString("en")} tokens: ${which}. ${kind} ` +
    `${theme() === "dark" ? "Lighter" : "Darker"} means more tokens; the shape under the curves is the chosen sublayer's histogram.`;
}

// the share of the run's steps beyond a length; within a bin they are spread evenly
function shareBeyond({ counts, total }, beta) {
  return counts.reduce((sum, count, bin) => {
    const from = data.edges[bin], to = data.edges[bin + 1];
    return sum + count * Math.min(1, Math.max(0, (to - beta) / (to - from)));
  }, 0) / total;
}

// where they part

const LOG_BETAS = many(240, Math.log(0.01), Math.log(data.largestBeta)).map(Math.exp);

function drawPart() {
  const decades = (from, to) => many(to - from, from, to).map(power => 10 ** power), svg = $("part");
  const { X, Y, left, right } = plot(svg, 250, { from: 0.01, to: data.largestBeta, log: true, ticks: [0.01, 0.03, 0.1, 0.3, 1, 3] },
    { from: 1e-3, to: 360, log: true, ticks: decades(-3, 2), text: tick => `${number(tick)}°` }, "β", "|θ(β) − β|");
  for (const one of settings.contestants) {
    const points = LOG_BETAS.map(beta => [beta, Math.abs(capped(one, beta) - beta) * DEGREES]).filter(([, gap]) => gap >= 1e-3);
    if (points.length > 1) svg.append(curve(one, line(points.map(([beta, gap]) => [X(beta), Y(gap)]))));
  }
  const tolerance = Y(settings.tolerance);
  svg.append(node("path", { class: "guide", d: line([[left, tolerance], [right, tolerance]]) }),
    node("text", { x: left + 4, y: tolerance - 5 }, `${number(settings.tolerance)}°`));
  drawPairs();
}

function partingStep(one, other) {
  const gap = beta => Math.abs(capped(one, beta) - capped(other, beta)) * DEGREES - settings.tolerance;
  const index = LOG_BETAS.findIndex(beta => gap(beta) >= 0);
  if (index < 0) return null;
  let low = index ? LOG_BETAS[index - 1] : 0, high = LOG_BETAS[index];
  for (let i = 0; i < 40; i++) {
    const middle = (low + high) / 2;
    if (gap(middle) >= 0) high = middle; else low = middle;
  }
  return high;
}

function drawPairs() {
  const chosen = chosenRun(), all = settings.contestants, table = $("pairs");
  table.replaceChildren();
  const head = table.createTHead().insertRow(), body = table.createTBody();
  ["", ...all.slice(1).map(one => one.name)].forEach(text => {
    const cell = head.appendChild(document.createElement("th"));
    cell.textContent = text;
    cell.scope = "col";
  });
  all.slice(0, -1).forEach((one, index) => cells(body.insertRow(), [named(one), ...all.slice(1).map((other, column) => {
    if (column < index) return "";
    const beta = partingStep(one, other), cell = document.createDocumentFragment();
    cell.append(beta === null ? "never" : number(beta));
    if (chosen && beta !== null) {
      const share = cell.appendChild(document.createElement("small"));
      share.textContent = `${(100 * shareBeyond(chosen, beta)).toFixed(1)} %`;
    }
    return cell;
  })]));
}

// the budget

function drawBudget() {
  const one = chosenRetraction("budget-retraction"), svg = $("budget"), count = 2 * data.layers[settings.layers];
  const sums = data.schedules.map((schedule, index) => {
    const factors = schedule.factors[settings.layers];
    let sum = 0;
    const angles = factors.map(factor => sum += capped(one, factor * settings.eta));
    return { name: schedule.name, ...look("schedule", index), angles, factor: factors.reduce((a, b) => a + b, 0) };
  });
  const largest = Math.max(...sums.map(s => s.angles[count - 1])) * DEGREES * 1.05 || 1;
  const { X, Y } = plot(svg, 250, { from: 0, to: count, ticks: ticks(count, 6) },
    { from: 0, to: largest, ticks: ticks(largest, 5), text: tick => `${number(tick)}°` }, "sublayer", "sum of angles");
  $("budgets").tBodies[0].replaceChildren();
  for (const s of sums) {
    svg.append(curve(s, line([[X(0), Y(0)], ...s.angles.map((angle, index) => [X(index + 1), Y(angle * DEGREES)])])));
    const total = s.angles[count - 1], half = total ? 1 - s.angles[count / 2 - 1] / total : 0;
    cells($("budgets").tBodies[0].insertRow(), [named(s), number(s.factor), degrees(total), `${Math.round(100 * half)} %`]);
  }
}

// events: whatever changes within one frame is drawn once

const waiting = new Set();
function later(...drawings) {
  if (!waiting.size) requestAnimationFrame(() => {
    const now = [...waiting];
    waiting.clear();
    now.forEach(draw => draw());
  });
  drawings.forEach(draw => waiting.add(draw));
  save();
}

function readings() {
  const body = $("readings").tBodies[0];
  body.replaceChildren();
  for (const one of settings.contestants) cells(body.insertRow(), [named(one), one.formula.replaceAll("beta", "β"), ""]);
  for (const id of ["turn-retraction", "budget-retraction"]) {
    const before = $(id).value || data.retractions[0].name;
    $(id).replaceChildren(...settings.contestants.map(one => new Option(one.name, one.key)));
    $(id).value = before;
  }
}

function drawAll() {
  read();
  readings();
  drawJourney();
  drawTurn();
  drawAngle();
  drawHeat();
  drawPart();
  drawBudget();
}

const ON_CHANGE = {
  played: [read, drawJourney],
  size: [read, drawJourney],
  "turn-retraction": [drawJourney],
  p: [read, readings, drawJourney, moveTurn, drawAngle, drawPart, drawBudget],
  alpha: [read, moveTurn],
  cap: [read, drawJourney, moveTurn, drawAngle, drawPart, drawBudget],
  "cap-angle": [read, drawJourney, moveTurn, drawAngle, drawPart, drawBudget],
  axis: [read, drawAngle, drawHeat],
  tolerance: [read, drawPart],
  depth: [read, drawBudget],
  eta: [read, drawBudget],
  "budget-retraction": [drawBudget],
  sublayer: [drawAngle, drawHeat, drawPairs],
};
for (const [id, drawings] of Object.entries(ON_CHANGE)) $(id)?.addEventListener("input", () => {
  if (id === "played") pause();
  later(...drawings);
});
$("run")?.addEventListener("input", () => {
  boundSublayer();
  later(drawAngle, drawHeat, drawPairs);
});
$("play").addEventListener("click", () => playing === null ? play() : pause());
$("other").addEventListener("click", () => {
  $("seed").value = Number($("seed").value) % 999 + 1;
  later(drawJourney);
});

function boundSublayer() {
  if (data.runs.length) $("sublayer").max = data.runs[Number($("run").value)].sublayers.length;
}

function moveTo(x, y) {
  // to three digits, as the link has them
  settings.f = [Math.max(-2, Math.min(2, x)), Math.max(-2, Math.min(0.65, y))].map(value => Math.round(1000 * value) / 1000);
  later(moveTurn);
}

let grip = null;
$("turn").addEventListener("pointerdown", event => {
  if (!event.target.closest("#handle")) return;
  const [x, y] = settings.f;
  grip = [event.clientX / unit - x, event.clientY / unit + y];
  $("turn").setPointerCapture(event.pointerId);
  $("handle").focus({ preventScroll: true });
  event.preventDefault();
});
$("turn").addEventListener("pointermove", event => {
  if (grip) moveTo(event.clientX / unit - grip[0], grip[1] - event.clientY / unit);
});
for (const end of ["pointerup", "pointercancel"]) $("turn").addEventListener(end, () => { grip = null; });
$("turn").addEventListener("keydown", event => {
  const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }, way = ways[event.key];
  if (!way && event.key !== "Home") return;
  const size = event.shiftKey ? 0.25 : 0.05;
  if (way) moveTo(settings.f[0] + size * way[0], settings.f[1] + size * way[1]); else moveTo(...START);
  event.preventDefault();
});
for (const kind of ["pointerdown", "pointermove"]) $("angle").addEventListener(kind, event => {
  const { left, right } = anglePlot, x = event.clientX - $("angle").getBoundingClientRect().left;
  moveMark(settings.axis * Math.max(0, Math.min(1, (x - left) / (right - left))));
});
// a finger leaves what it read
$("angle").addEventListener("pointerleave", event => { if (event.pointerType === "mouse") moveMark(); });

// theme: the button names the other one

const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  return root.dataset.theme || (dark.matches ? "dark" : "light");
}

function showTheme() {
  $("theme").textContent = theme() === "dark" ? "light" : "dark";
  $("theme").setAttribute("aria-label", `${$("theme").textContent} theme`);
  drawHeat();
}

$("theme").addEventListener("click", () => {
  root.dataset.theme = theme() === "dark" ? "light" : "dark";
  showTheme();
  save();
});
dark.addEventListener("change", showTheme);

// the address holds every setting that is not as at first, so that a reload and a shared link show the same

const CONTROLS = [...document.querySelectorAll("input, select")].map(element => element.id);
let atFirst = {}, saving = null;

function link() {
  const values = new URLSearchParams();
  for (const id of CONTROLS) if ($(id).value !== atFirst[id]) values.set(id, $(id).value);
  if (String(settings.f) !== String(START)) values.set("f", settings.f.join(","));
  if (root.dataset.theme) values.set("theme", root.dataset.theme);
  return location.href.split("#")[0] + (String(values) && `#${values}`);
}

// once things rest: browsers refuse an address that changes all the time
function save() {
  clearTimeout(saving);
  saving = setTimeout(() => history.replaceState(null, "", link()), 200);
}

function follow() {
  const values = new URLSearchParams(location.hash.slice(1));
  for (const id of CONTROLS) {
    const value = values.get(id);
    $(id).value = value ?? atFirst[id];
    // a control takes no value that it has no place for, but the seed's is hidden and takes any
    if (value !== null && ($(id).value !== value || id === "seed" && !/^[0-9]{1,3}$/.test(value))) $(id).value = atFirst[id];
    if (id === "run") boundSublayer();
  }
  const f = (values.get("f") || "").split(",").map(Number);
  settings.f = START.slice();
  if (f.length === 2 && f.every(Number.isFinite)) moveTo(...f);
  if (["light", "dark"].includes(values.get("theme"))) root.dataset.theme = values.get("theme"); else delete root.dataset.theme;
  pause();
  drawAll();
  showTheme();
}
addEventListener("hashchange", follow);

// the axis ends where all but one in a hundred of the runs' steps do
if (data.runs.length) {
  const counts = data.edges.slice(1).map((_, bin) => data.runs.flatMap(run => run.sublayers).reduce((sum, s) => sum + s.counts[bin], 0));
  const steps = { counts, total: counts.reduce((a, b) => a + b, 0) };
  const enough = AXES.findIndex(axis => shareBeyond(steps, axis) < 0.01);
  $("axis").value = enough < 0 ? AXES.length - 1 : enough;
}
read();
readings();
atFirst = Object.fromEntries(CONTROLS.map(id => [id, $(id).value]));
follow();
let lastWidth = document.body.clientWidth;
addEventListener("resize", () => {
  if (document.body.clientWidth !== lastWidth) later(drawAll);
  lastWidth = document.body.clientWidth;
});
