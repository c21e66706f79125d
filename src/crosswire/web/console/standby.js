// What a standby shows instead of every screen: who leads, and how far the replicas are.

import * as api from "./api.js";
import { el, notice } from "./dom.js";
import { count, duration, name, visible } from "./format.js";
import { leaderText } from "./sign_in.js";
import { plainTable } from "./table.js";

export async function showStandby(screen) {
  const { leader, leader_address: address } = screen.session;
  screen.heading("This hub is a standby");
  screen.root.append(notice("info", leaderText(leader, address), " A standby serves no messages; this page shows it again as soon as it leads."));
  const there = consoleAt(address);
  if (leader && there) {
    screen.root.append(el("p", {}, el("a", { class: "button primary", href: there, rel: "noreferrer" }, "Go to the leader's console")));
  }
  if (!screen.session.observe) return;
  const state = await api.get("/v1/replication", {}, screen.signal);
  screen.root.append(replicasPanel(state));
}

/** The address of a console from what a replica advertises; null if that is none. */
function consoleAt(address) {
  try {
    const found = new URL(/^https?:\/\//.test(address) ? address : `${location.protocol}//${address}`);
    return address ? `${found.origin}/` : null;
  } catch {
    return null;
  }
}

/** Replicas with their roles and lags. */
export function replicasPanel(state) {
  const problems = [state.trouble, state.fault, ...state.alarms].filter(Boolean);
  return el("section", { class: "panel" }, el("h2", {}, "Replicas"),
    problems.map((text) => notice("warn", visible(text))),
    plainTable({
      caption: "Replicas",
      rows: state.replicas,
      empty: "No replica has reported yet.",
      columns: [
        { title: "Name", cell: (row) => name(row.name) },
        { title: "Role", cell: (row) => row.role },
        { title: "Address", cell: (row) => name(row.address) },
        { title: "On its disk", number: true, cell: (row) => count(row.synced) },
        { title: "Behind", number: true, cell: (row) => count(row.lag) },
        { title: "Reported", cell: (row) => `${duration(row.age_s)} ago` },
        { title: "Version", hide: true, cell: (row) => visible(row.version) },
      ],
    }),
    el("p", { class: "muted" }, `Term ${count(state.term)} · record ${count(state.applied)} applied here`));
}
