"use strict";

// Curves: read the values at the pointer.
for (const figure of document.querySelectorAll("[data-readout]")) {
  const { box: [left, top, right, bottom], limits: [low, high], steps, lines } = JSON.parse(figure.dataset.readout);
  const svg = figure.querySelector("svg"), output = figure.querySelector("output");
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", top);
  cursor.setAttribute("y2", bottom);
  const place = (step) => left + (step - low) / (high - low) * (right - left);
  svg.addEventListener("pointermove", (event) => {
    const x = event.offsetX * svg.viewBox.baseVal.width / svg.clientWidth;
    let nearest = 0;
    steps.forEach((step, i) => { if (Math.abs(place(step) - x) < Math.abs(place(steps[nearest]) - x)) nearest = i; });
    cursor.setAttribute("x1", place(steps[nearest]));
    cursor.setAttribute("x2", place(steps[nearest]));
    svg.append(cursor);
    const values = lines.map((line) => lines.length > 1 ? `${line.label.replace(/ <?\d+%$/, "")} ${line.values[nearest]}` : line.values[nearest]);
    output.textContent = `step ${Math.round(steps[nearest])}: ${values.join(" · ")}`;
  });
  svg.addEventListener("pointerleave", () => { cursor.remove(); output.textContent = ""; });
}

// Samples: filter, a page at a time.
const PAGE = 24;
const filters = document.getElementById("sample-filters");
if (filters) {
  const rows = [...document.querySelectorAll(".samples tbody tr")];
  const more = document.getElementById("sample-more"), count = document.getElementById("sample-count");
  const told = count.textContent;
  let shown = PAGE;
  const apply = () => {
    const { step, right, source, text } = Object.fromEntries(new FormData(filters));
    const wanted = text.toLowerCase();
    const matching = rows.filter((row) => (!step || row.dataset.step === step) && (!right || row.dataset.right === right)
      && (!source || row.dataset.source === source) && (!wanted || row.textContent.toLowerCase().includes(wanted)));
    const visible = new Set(matching.slice(0, shown));
    rows.forEach((row) => { row.hidden = !visible.has(row); });
    more.hidden = matching.length <= shown;
    count.textContent = matching.length === rows.length ? told : `${matching.length} of ${told}`;
  };
  filters.addEventListener("input", () => { shown = PAGE; apply(); });
  filters.addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => { shown += 2 * PAGE; apply(); });
  apply();
}

// Settings: filter, opening the groups that match.
const settings = document.getElementById("config-filter");
if (settings) {
  const groups = [...document.querySelectorAll("#config details")];
  const atFirst = groups.map((group) => group.open);
  settings.addEventListener("input", () => {
    const wanted = settings.value.toLowerCase();
    groups.forEach((group, i) => {
      let found = 0;
      for (const row of group.querySelectorAll("tr")) {
        row.hidden = !row.textContent.toLowerCase().includes(wanted);
        found += !row.hidden;
      }
      group.hidden = found === 0;
      group.open = wanted ? found > 0 : atFirst[i];
    });
  });
}
