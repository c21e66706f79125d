"use strict";
(() => {
  const root = document.documentElement;

  // Light or dark: the setting of the system, until the button is used.
  document.getElementById("theme").addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    const now = root.dataset.theme || system;
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });

  // Tables: a click sorts, numbers descending and text ascending; a second click reverses.
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  };
  const words = new Intl.Collator(undefined, { numeric: true });
  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const body = head.closest("table").tBodies[0];
      const column = head.cellIndex;
      const first = body.rows.length && typeof key(body.rows[0], column) === "number"
        ? "descending" : "ascending";
      const other = first === "descending" ? "ascending" : "descending";
      const order = head.getAttribute("aria-sort") === first ? other : first;
      for (const each of head.parentNode.cells) each.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...body.rows].map((row) => [key(row, column), row]);
      rows.sort(([a], [b]) => sign * (typeof a === "number" ? a - b : words.compare(a, b)));
      body.append(...rows.map(([, row]) => row));
    });
  }

  // Copying. Without the clipboard's interface (a page that is not served securely has none) the
  // text is selected instead, for the keyboard.
  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      let done = "copied";
      try {
        await navigator.clipboard.writeText(button.dataset.copy);
      } catch {
        const code = button.previousElementSibling;
        if (code) getSelection().selectAllChildren(code);
        done = code && document.execCommand("copy") ? "copied" : "selected";
      }
      button.textContent = done;
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }

  // A link to a message opens its steps.
  const unfold = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) {
      target.open = true;
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", unfold);
  unfold();

  // Tooltips.
  const tip = document.getElementById("tip");
  document.addEventListener("pointermove", (event) => {
    const target = event.target instanceof Element && event.target.closest("[data-tip]");
    tip.hidden = !target;
    if (!target) return;
    tip.textContent = target.dataset.tip;
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
    const above = event.clientY + 18 + box.height > innerHeight;
    tip.style.left = `${Math.max(left, 4)}px`;
    tip.style.top = `${above ? event.clientY - box.height - 10 : event.clientY + 18}px`;
  });

  // The graph: highlights the edges of the box under the pointer.
  for (const graph of document.querySelectorAll("svg.graph")) {
    const edges = [...graph.querySelectorAll(".edge")];
    const nodes = [...graph.querySelectorAll(".node")];
    const show = (chosen) => {
      const near = new Set(chosen);
      for (const edge of edges) {
        const { a, b } = edge.dataset;
        const belongs = !chosen.length || chosen.includes(a) || chosen.includes(b);
        edge.classList.toggle("dim", !belongs);
        if (belongs) near.add(a).add(b);
      }
      for (const node of nodes) node.classList.toggle("dim", chosen.length > 0 && !near.has(node.dataset.n));
    };
    for (const node of nodes) {
      for (const name of ["pointerenter", "focus"]) node.addEventListener(name, () => show([node.dataset.n]));
      for (const name of ["pointerleave", "blur"]) node.addEventListener(name, () => show([]));
    }
  }

  // On paper nothing can be unfolded.
  addEventListener("beforeprint", () => {
    for (const each of document.querySelectorAll("details:not(.message)")) each.open = true;
  });
})();
