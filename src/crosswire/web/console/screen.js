// What a screen gets: where to show itself, its part of the URL, and an end when it is left.

import { el, notice, put } from "./dom.js";
import { visible } from "./format.js";
import * as router from "./router.js";

export class Screen {
  /** `root` is the element to fill; `session` the answer of /v1/session. */
  constructor(root, params, query, session) {
    this.root = root;
    this.params = params;
    this.query = query;
    this.session = session;
    this.left = new AbortController();
    /** Ends requests and streams when the screen is left. */
    this.signal = this.left.signal;
  }

  /** Shows a heading, its way back as [text, href] pairs, and elements for what can be done. */
  heading(title, { back = [], actions = null, subtitle = null } = {}) {
    const text = typeof title === "string" ? title : title.textContent;
    document.title = `${visible(text)} – Crosswire`;
    const crumbs = back.length
      ? el("nav", { class: "crumbs", "aria-label": "Breadcrumbs" },
        back.map(([label, href]) => el("a", { href }, label)))
      : null;
    const shown = el("header", { class: "screen-head" }, crumbs,
      el("div", { class: "screen-title" }, el("h1", { tabindex: "-1" }, title),
        subtitle ? el("p", { class: "subtitle" }, subtitle) : null,
        actions ? el("div", { class: "actions" }, actions) : null));
    this.root.append(shown);
    return shown;
  }

  /** Changes its part of the URL without showing it anew. */
  setQuery(changes, options) {
    this.query = router.setQuery(changes, options);
    const main = this.root.closest("main");
    if (main) main.dataset.screen = location.hash;
  }

  /** Shows it anew. */
  reload() {
    router.navigate();
  }

  /** Calls a function again and again while the screen is shown, and the tab is visible. */
  every(milliseconds, act) {
    const timer = setInterval(() => { if (!document.hidden) act(); }, milliseconds);
    this.signal.addEventListener("abort", () => clearInterval(timer));
  }

  /** Shows an error of a request in an element, or at the end of the screen; not the end of it. */
  fail(error, where = null) {
    if (error.name === "AbortError" || this.signal.aborted) return;
    if (!(error.name === "ApiError")) console.error(error);
    const shown = notice("bad", error.message);
    if (where) put(where, shown);
    else this.root.append(shown);
  }

  leave() {
    this.left.abort();
  }
}
