// what every report can do: sort a table, show the source of a number, change the theme, print everything
(() => {
  "use strict";

  // theme: the button names the other one. A page keeps no choice: it opens as the system is set
  const root = document.documentElement, themeButton = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const themeChanged = () => {
    themeButton.textContent = theme() === "dark" ? "light" : "dark";
    themeButton.setAttribute("aria-label", `${themeButton.textContent} theme`);
    document.dispatchEvent(new Event("themechange"));
  };
  themeButton.hidden = false;
  themeButton.addEventListener("click", () => { root.dataset.theme = theme() === "dark" ? "light" : "dark"; themeChanged(); });
  dark.addEventListener("change", themeChanged);
  themeChanged();

  // sorting: ascending, descending, and back to the first order
  const number = (cell) => {
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    const found = /^[-+\u2212]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?/i.exec(cell.textContent.trim());
    return found ? Number(found[0].replace("\u2212", "-").replaceAll(",", "")) : NaN;
  };
  const sortRows = (table, column, direction) => {
    const rows = [...table.tBodies[0].rows].sort((a, b) => a.dataset.place - b.dataset.place);
    if (direction) {
      const keys = new Map(rows.map((row) => [row, column ? number(row.cells[column]) : NaN]));
      const numeric = [...keys.values()].some((key) => !Number.isNaN(key));
      const text = (row) => row.cells[column].textContent.trim();
      rows.sort((a, b) => {
        if (!numeric) return direction * text(a).localeCompare(text(b), "en", { numeric: true });
        const [x, y] = [keys.get(a), keys.get(b)];
        // what has no number comes last either way
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
        return direction * (x - y);
      });
    }
    table.tBodies[0].append(...rows);
  };
  for (const table of document.querySelectorAll("table")) {
    [...table.tBodies[0].rows].forEach((row, place) => { row.dataset.place = place; });
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const next = { ascending: "descending", descending: null }[head.getAttribute("aria-sort")];
        const order = next === undefined ? "ascending" : next;
        for (const other of heads) other.removeAttribute("aria-sort");
        if (order) head.setAttribute("aria-sort", order);
        sortRows(table, column, { ascending: 1, descending: -1 }[order] || 0);
      });
    });
    // one stop of the tab key per table; arrows go on from there
    const first = table.querySelector("td[title]");
    if (first) first.tabIndex = 0;
  }

  // the source of a number: on hover, on focus, on a tap
  const tip = document.createElement("div");
  tip.id = "source";
  tip.role = "tooltip";
  tip.hidden = true;
  document.body.append(tip);
  const words = (cell) => {
    if (cell.title) {
      cell.dataset.words = cell.title;
      cell.removeAttribute("title");
    }
    return cell.dataset.words;
  };
  const show = (cell) => {
    tip.textContent = words(cell);
    tip.hidden = false;
    const box = cell.getBoundingClientRect(), own = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - own.width - 8))}px`;
    tip.style.top = `${box.bottom + own.height + 8 < innerHeight ? box.bottom + 4 : Math.max(4, box.top - own.height - 4)}px`;
    cell.setAttribute("aria-describedby", "source");
  };
  const hide = () => {
    tip.hidden = true;
    document.querySelector("[aria-describedby=source]")?.removeAttribute("aria-describedby");
  };
  const traced = (event) => {
    const cell = event.target.closest?.("td");
    return cell && (cell.title || cell.dataset.words) ? cell : null;
  };
  for (const kind of ["mouseover", "focusin", "click"]) {
    document.addEventListener(kind, (event) => {
      const cell = traced(event);
      if (cell) show(cell);
      else hide();
    });
  }
  document.addEventListener("scroll", hide, { passive: true });
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    const cell = event.target.closest?.("td"), step = steps[event.key];
    if (!cell || !step) return;
    let row = cell.parentElement, column = cell.cellIndex + step[1];
    if (step[0]) row = step[0] > 0 ? row.nextElementSibling : row.previousElementSibling;
    const next = row?.cells[column];
    if (next?.tagName !== "TD") return;
    event.preventDefault();
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  // a frame that can be moved sideways shows whether there is more to see
  const frames = [...document.querySelectorAll(".scroll, nav, thead tr")];
  const mark = (frame) => {
    const more = getComputedStyle(frame).overflowX === "auto" && frame.scrollLeft + frame.clientWidth < frame.scrollWidth - 2;
    frame.classList.toggle("more", more);
  };
  const resized = new ResizeObserver((entries) => entries.forEach((entry) => mark(entry.target)));
  for (const frame of frames) {
    resized.observe(frame);
    frame.addEventListener("scroll", () => mark(frame), { passive: true });
  }

  // print: everything unfolded, then folded as it was
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const each of opened) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of opened) each.open = false; });
})();
