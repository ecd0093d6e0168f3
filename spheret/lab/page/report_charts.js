// interactive curves in the place of the static figures: values, series to switch, smoothing, zoom by dragging
(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const element = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // the mean of the last `window` points, or of all there are so far
  const smoothed = (values, window) => {
    if (window === 1) return values;
    let sum = 0;
    return values.map((value, index) => {
      sum += value - (index >= window ? values[index - window] : 0);
      return sum / Math.min(index + 1, window);
    });
  };

  // the line beside a name, as the tables have it
  const key = (series) => {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg"), line = document.createElementNS(space, "line");
    svg.setAttribute("class", "key");
    svg.setAttribute("viewBox", "0 0 24 8");
    for (const [name, value] of Object.entries({ x1: 1, x2: 23, y1: 4, y2: 4 })) line.setAttribute(name, value);
    if (series.dash.length) line.setAttribute("stroke-dasharray", series.dash.join(" "));
    line.style.stroke = `var(--line-${series.colour})`;
    svg.append(line);
    return svg;
  };

  // the columns of a plot: x, then per line its values, or its values with the lowest and the highest seed
  const columns = (chart, window) => {
    const tables = chart.series.flatMap((series) => series.lines.map((line) => [
      chart.xs[line.x], ...["y", "low", "high"].filter((name) => line[name]).map((name) => smoothed(line[name], window)),
    ]));
    return chart.xs.length === 1 ? [chart.xs[0], ...tables.flatMap((table) => table.slice(1))] : uPlot.join(tables);
  };

  // what uPlot draws of each column; `owner` is the place of its contestant
  const layout = (chart) => {
    const drawn = [{}], bands = [];
    chart.series.forEach((series, owner) => {
      const stroke = () => variable(`--line-${series.colour}`);
      for (const line of series.lines) {
        const place = drawn.length;
        drawn.push({ owner, label: series.label, stroke, width: 2, dash: series.dash.map((length) => 2 * length),
          spanGaps: true, points: { show: chart.xs[line.x].length < 2 } });
        if (line.low) {
          for (const end of ["low", "high"]) {
            drawn.push({ owner, end, label: `${series.label}, ${end}`, stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
          }
          bands.push({ series: [place + 2, place + 1], fill: () => `color-mix(in srgb, ${stroke()} 18%, transparent)` });
        }
      }
    });
    return { drawn, bands };
  };

  const build = (figure, chart) => {
    const format = (value) => (value == null ? "" : chart.log ? Number(value.toPrecision(chart.digits)).toString() : value.toFixed(chart.digits));
    const { drawn, bands } = layout(chart);
    const live = element("div", "live"), bar = element("div", "bar"), plot = element("div", "plot");
    const legend = element("ul", "legend"), xName = element("div", "x-name", `${chart.x} \u2192`);
    bar.append(element("span", "", `\u2191 ${chart.y}`));
    live.append(bar, plot, xName, legend);
    figure.prepend(live);
    figure.classList.add("is-live");
    plot.tabIndex = 0;
    plot.role = "group";
    plot.setAttribute("aria-label", `${figure.querySelector("figcaption").firstChild.textContent}. Arrow keys move through the points.`);

    const tip = element("div", "tip");
    tip.hidden = true;
    let focused = null;

    // the nearest point of a column, because series may have points at other places
    const nearest = (u, column, index) => {
      const values = u.data[column];
      for (let far = 0; far < values.length; far++) {
        if (values[index - far] != null) return index - far;
        if (values[index + far] != null) return index + far;
      }
      return index;
    };
    const last = (values) => {
      for (let index = values.length - 1; index >= 0; index--) if (values[index] != null) return index;
      return null;
    };

    const entries = chart.series.map((series, owner) => {
      const button = element("button"), value = element("span", "value");
      button.type = "button";
      button.title = `${series.label}: show or hide`;
      button.setAttribute("aria-pressed", "true");
      button.append(key(series), element("span", "name", series.label + (series.diverged ? " (\u00d7 diverged)" : "")), value);
      button.addEventListener("click", () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", on);
        drawn.forEach((each, place) => { if (each.owner === owner) u.setSeries(place, { show: on }); });
      });
      const column = drawn.findIndex((each) => each.owner === owner);
      // under the mouse a name brings its curve forward
      button.addEventListener("mouseenter", () => u.setSeries(column, { focus: true }));
      button.addEventListener("mouseleave", () => u.setSeries(null, { focus: true }));
      const item = element("li");
      item.append(button);
      legend.append(item);
      return { value, column };
    });

    // beside each name stands the value under the cursor, or the last one
    const read = (u) => {
      const index = u.cursor.idx;
      for (const { value, column } of entries) {
        const place = index == null ? last(u.data[column]) : nearest(u, column, index);
        value.textContent = place == null ? "" : format(u.data[column][place]);
      }
      tip.hidden = index == null || u.cursor.left < 0;
      if (tip.hidden) return;
      tip.replaceChildren(`${chart.x.split(",")[0]} ${Number(u.data[0][index].toPrecision(5))}`);
      if (focused != null && drawn[focused]?.label && !drawn[focused].end) {
        tip.append(element("br"), element("b", "", drawn[focused].label), ` ${format(u.data[focused][nearest(u, focused, index)])}`);
      }
      const right = u.cursor.left > u.over.clientWidth / 2;
      tip.style.top = `${Math.max(0, u.cursor.top - 44)}px`;
      tip.style.left = right ? "" : `${u.cursor.left + 14}px`;
      tip.style.right = right ? `${u.over.clientWidth - u.cursor.left + 14}px` : "";
    };

    // a cross where a run diverged
    const crosses = (u) => {
      drawn.forEach((each, place) => {
        if (!place || each.end || !chart.series[each.owner].diverged || !u.series[place].show) return;
        const index = last(u.data[place]);
        if (index == null) return;
        const x = u.valToPos(u.data[0][index], "x", true), y = u.valToPos(u.data[place][index], "y", true), size = 5 * devicePixelRatio;
        if (y < u.bbox.top) return;
        u.ctx.save();
        u.ctx.strokeStyle = each.stroke();
        u.ctx.lineWidth = 2.5 * devicePixelRatio;
        u.ctx.beginPath();
        u.ctx.moveTo(x - size, y - size); u.ctx.lineTo(x + size, y + size);
        u.ctx.moveTo(x - size, y + size); u.ctx.lineTo(x + size, y - size);
        u.ctx.stroke();
        u.ctx.restore();
      });
    };

    // a line with a name where something happened; a name that would lie on another one is left out
    const marks = (u) => {
      let free = u.bbox.left;
      for (const mark of chart.marks || []) {
        const x = u.valToPos(mark.x, "x", true), { left, top, width, height: high } = u.bbox;
        if (x < left || x > left + width) continue;
        u.ctx.save();
        u.ctx.strokeStyle = u.ctx.fillStyle = variable(`--line-${mark.colour}`);
        u.ctx.lineWidth = devicePixelRatio;
        u.ctx.setLineDash([5 * devicePixelRatio, 3 * devicePixelRatio]);
        u.ctx.beginPath();
        u.ctx.moveTo(x, top); u.ctx.lineTo(x, top + high);
        u.ctx.stroke();
        u.ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
        u.ctx.textBaseline = "top";
        const gap = 4 * devicePixelRatio, size = u.ctx.measureText(mark.text).width, before = x + gap + size > left + width;
        u.ctx.textAlign = before ? "right" : "left";
        if (x >= free) { u.ctx.fillText(mark.text, before ? x - gap : x + gap, top); free = x + size + 2 * gap; }
        u.ctx.restore();
      }
    };

    const height = () => Math.round(Math.max(220, Math.min(0.56 * live.clientWidth, 380)));
    const axis = { stroke: () => variable("--muted"), font: "12px system-ui, sans-serif", ticks: { show: false },
      grid: { stroke: () => variable("--faint"), width: 1 } };
    const options = {
      width: live.clientWidth, height: height(), legend: { show: false }, series: drawn, bands, padding: [8, 12, 0, 0],
      focus: { alpha: 0.35 },
      scales: {
        x: { time: false },
        y: chart.log ? { distr: 3 } : {
          range: (u, low, high) => {
            const [x] = u.data, whole = u.scales.x.min <= x[0] && u.scales.x.max >= x[x.length - 1];
            if (whole && chart.range) return chart.range;
            const margin = 0.05 * Math.max(high - low, 0.01);
            return [low - margin, high + margin];
          },
        },
      },
      axes: [{ ...axis, size: 28, gap: 4 }, { ...axis, size: 46, gap: 4,
        ...(chart.log ? { values: (u, ticks) => ticks.map((tick) => (tick == null ? null : String(Number(tick.toPrecision(2))))) } : {}) }],
      cursor: { y: false, focus: { prox: 30 }, dataIdx: nearest, drag: { x: true, y: false },
        points: { size: 7, show: (u, place) => { const dot = element("div"); if (u.series[place].end) dot.style.display = "none"; return dot; } } },
      hooks: { setCursor: [read], setSeries: [(u, place) => { focused = place; read(u); }], setData: [read], draw: [crosses, marks] },
    };

    // smoothing, where a line has enough points for it, and where points follow each other in time
    const most = Math.max(...chart.xs.map((places) => places.length));
    let window = 1;
    if (most >= 20 && chart.window) {
      const windows = [1, 2, 3, 5, 10, 20, 30, 50, 100].filter((each) => each <= most / 3);
      const label = element("label"), slider = element("input"), output = element("output");
      Object.assign(slider, { type: "range", min: 0, max: windows.length - 1, step: 1 });
      slider.value = windows.findLastIndex((each) => each <= Math.max(1, chart.window));
      const say = () => {
        window = windows[slider.value];
        output.textContent = window === 1 ? "off" : `mean of ${window} points`;
        slider.setAttribute("aria-valuetext", output.textContent);
      };
      say();
      slider.addEventListener("input", () => { say(); u.setData(columns(chart, window), false); u.redraw(); });
      label.append("smooth", slider, output);
      bar.append(label);
    }

    const u = new uPlot(options, columns(chart, window), plot);
    u.over.append(tip);
    read(u);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") u.setCursor({ left: -10, top: -10 });
      if (!step) return;
      event.preventDefault();
      const now = u.cursor.idx ?? (step > 0 ? -1 : u.data[0].length);
      const index = Math.min(Math.max(now + step, 0), u.data[0].length - 1);
      u.setCursor({ left: u.valToPos(u.data[0][index], "x"), top: u.over.clientHeight / 2 });
    });
    plot.addEventListener("blur", () => u.setCursor({ left: -10, top: -10 }));
    new ResizeObserver(() => {
      if (live.clientWidth && live.clientWidth !== u.width) u.setSize({ width: live.clientWidth, height: height() });
    }).observe(live);
    document.addEventListener("themechange", () => u.redraw());
    return u;
  };

  for (const figure of document.querySelectorAll("figure[data-chart]")) build(figure, charts[figure.dataset.chart]);
})();
