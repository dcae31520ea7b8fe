const table = document.querySelector("table.survey");

for (const button of table.querySelectorAll(".unfold")) {
  const details = document.getElementById(button.getAttribute("aria-controls"));
  const show = (open) => {
    button.setAttribute("aria-expanded", open);
    details.hidden = !open;
  };
  show(false);
  button.addEventListener("click", () => show(details.hidden));
}

const filters = [...document.querySelectorAll("[data-filter]")];
for (const filter of filters) {
  filter.addEventListener("click", () => {
    for (const other of filters) other.setAttribute("aria-pressed", other === filter);
    for (const body of table.tBodies) {
      body.hidden = filter.dataset.filter !== "" && body.dataset.outcome !== filter.dataset.filter;
    }
  });
}

const headers = [...table.querySelectorAll("[data-sort]")];
for (const header of headers) {
  header.addEventListener("click", () => {
    const cell = header.parentElement;
    const down = cell.getAttribute("aria-sort") === "ascending";
    for (const other of headers) other.parentElement.setAttribute("aria-sort", "none");
    cell.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (key) => key === "inf" ? Infinity : Number(key);
    const compare = header.dataset.kind === "number"
      ? (a, b) => { const x = value(a), y = value(b); return x === y ? 0 : x < y ? -1 : 1; }
      : (a, b) => a.localeCompare(b);
    const bodies = [...table.tBodies].map((body) => [body.rows[0].cells[header.dataset.sort].dataset.key, body]);
    bodies.sort(([a], [b]) => down ? compare(b, a) : compare(a, b));
    table.append(...bodies.map(([, body]) => body));
  });
}
