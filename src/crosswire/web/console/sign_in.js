// Sign-in with a token, which stays in this tab.

import * as api from "./api.js";
import { el, notice, put } from "./dom.js";
import { visible } from "./format.js";
import { themeButton } from "./theme.js";

/** Shows the form in `root`; calls `done()` when the hub has accepted a token. */
export function signIn(root, reason, done) {
  document.title = "Sign in – Crosswire";
  const input = el("input", { id: "token", type: "password", name: "token", autocomplete: "off", required: true, spellcheck: "false" });
  const outcome = el("div", { "aria-live": "polite" }, reason ? notice("info", reason) : null);
  const button = el("button", { type: "submit", class: "primary" }, "Sign in");
  const hub = el("div", {});
  const form = el("form", { class: "sign-in-form" },
    el("label", { for: "token" }, "Token"), input, button, outcome);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const token = input.value.trim();
    button.disabled = true;
    put(outcome, notice("info", "Signing in…"));
    try {
      await api.whoIs(token);
      api.setToken(token);
      await done();
    } catch (error) {
      put(outcome, notice("bad", error.status === 401 ? "The hub knows no user with this token." : error.message));
      input.select();
    } finally {
      button.disabled = false;
    }
  });
  put(root, el("main", { class: "sign-in", id: "main" },
    el("div", { class: "sign-in-head" }, el("img", { src: "/console/icon.svg", alt: "", width: 40, height: 40 }), el("h1", {}, "Crosswire")),
    el("p", {}, "Sign in with the token of a user of this hub. It is kept in this tab only, until you sign out or close it."),
    hub, form, themeButton()));
  input.focus();
  showHub(hub);
}

async function showHub(where) {
  try {
    const response = await fetch("/readyz", { cache: "no-store" });
    const found = await response.json();
    if (found.leader) {
      put(where, notice("warn", `This hub is a standby. ${leaderText(found.leader.name, found.leader.address)}`));
    }
  } catch {
    put(where, notice("bad", "The hub does not answer. It may be restarting."));
  }
}

export function leaderText(name, address) {
  if (!name) return "No replica leads at the moment.";
  return `The leader is ${visible(name)}${address ? ` at ${visible(address)}` : ""}.`;
}
