// Why is this forbidden? Whether a user has a right, and which rule decides it.

import * as api from "../api.js";
import { field } from "../dialog.js";
import { el, notice, put } from "../dom.js";
import { name } from "../format.js";
import { destinationLink, toUser } from "../links.js";

const RIGHTS = [
  ["produce", "produce: send messages"],
  ["consume", "consume: get messages"],
  ["call", "call: call a service"],
  ["serve", "serve: answer calls of a service"],
  ["observe", "observe: see states and names"],
  ["replicate", "replicate: fetch checkpoints"],
  ["administer", "administer: do everything"],
];
const OF_THE_HUB = ["observe", "replicate", "administer"];

export async function show(screen) {
  const { query, session } = screen;
  screen.heading("Why is this forbidden?", {
    back: [["Users", "#/users"]],
    subtitle: "Whether a user has a right, and the rule of the configuration that decides it.",
  });
  const user = field({ name: "user", label: "User", value: session.administer ? query.user ?? session.user : session.user, disabled: !session.administer,
    hint: session.administer ? "Empty for peers that did not identify themselves." : "Asking for others needs the right to administer." });
  const right = field({ name: "right", label: "Wants to", kind: "select", options: RIGHTS, value: query.right ?? "consume" });
  const destination = field({ name: "destination", label: "Destination", value: query.destination ?? "", placeholder: "queue/orders",
    hint: "A queue, topic or service, or a pattern such as topic/prices/#." });
  const answer = el("div", { "aria-live": "polite" });
  const form = el("form", { class: "panel ask-form" }, user.element, right.element, destination.element,
    el("div", {}, el("button", { type: "submit", class: "primary" }, "Explain")));
  right.input.addEventListener("change", adapt);
  form.addEventListener("submit", (event) => { event.preventDefault(); explain(); });
  screen.root.append(form, answer);
  adapt();
  if (query.right) await explain();

  function adapt() {
    destination.element.hidden = OF_THE_HUB.includes(right.value());
  }

  async function explain() {
    const asked = { right: right.value(), destination: destination.element.hidden ? "" : destination.value().trim() };
    screen.setQuery({ ...asked, user: user.value() }, { replace: true });
    // An empty name, a peer without identity, is not the same as none, the user who asks.
    const text = new URLSearchParams(Object.entries(asked).filter(([, value]) => value));
    if (session.administer) text.set("user", user.value());
    try {
      const found = await api.get(`/v1/access?${text}`, {}, screen.signal);
      put(answer, notice(found.allowed ? "good" : "bad",
        el("p", {}, el("b", {}, found.allowed ? "Allowed" : "Forbidden"), ": ",
          found.user ? el("a", { href: toUser(found.user) }, name(found.user)) : "a peer without identity",
          found.allowed ? " may " : " may not ", el("code", {}, found.right), " ",
          found.destination ? destinationLink(found.destination) : "this hub", "."),
        el("p", {}, "The rule that decides: ", el("b", {}, name(found.rule)))));
    } catch (error) {
      screen.fail(error, answer);
    }
  }
}
