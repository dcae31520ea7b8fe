for (const plot of document.querySelectorAll(".chart .plot")) {
  const tip = plot.querySelector(".tip");
  const middle = (mark) => {
    const box = mark.querySelector("path").getBoundingClientRect();
    return [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  };
  const marks = [...plot.querySelectorAll(".mark")].map((mark) => {
    const title = mark.querySelector("title"), words = title.textContent;
    title.remove(); // else a browser would show it beside the tip
    return {mark, words};
  });
  let seen = null;
  const show = (found) => {
    if (found === seen) return;
    if (seen) seen.mark.classList.remove("seen");
    seen = found;
    tip.hidden = !found;
    if (!found) return;
    found.mark.classList.add("seen");
    tip.textContent = found.words;
    const box = plot.getBoundingClientRect(), [x, y] = middle(found.mark).map((at, axis) => at - [box.left, box.top][axis]);
    const beyond = x + 12 + tip.offsetWidth > box.width;
    tip.style.left = `${Math.max(0, beyond ? x - 12 - tip.offsetWidth : x + 12)}px`;
    tip.style.top = `${Math.max(0, Math.min(y - 12, box.height - tip.offsetHeight))}px`;
  };
  const nearest = (event) => {
    let best = null, least = 40;
    for (const each of marks) {
      const [x, y] = middle(each.mark), distance = Math.hypot(x - event.clientX, y - event.clientY);
      if (distance < least) [best, least] = [each, distance];
    }
    show(best);
  };
  plot.addEventListener("pointermove", nearest);
  plot.addEventListener("pointerdown", nearest);
  plot.addEventListener("pointerleave", () => show(null));
  plot.addEventListener("blur", () => show(null));
  plot.addEventListener("keydown", (event) => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (event.key === "Escape") show(null);
    if (!step || !marks.length) return;
    event.preventDefault();
    const order = [...marks].sort((a, b) => middle(a.mark)[0] - middle(b.mark)[0]);
    const at = seen ? order.indexOf(seen) + step : step > 0 ? 0 : order.length - 1;
    show(order[(at + order.length) % order.length]);
  });
}
