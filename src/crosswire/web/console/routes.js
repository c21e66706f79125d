// The table of screens: one line each. A screen is a module with `show(screen)`; see main.js.
//
// `title` names the screen; with `group` it is in the navigation. `needs`: "observe" or
// "administer" leaves it out of the navigation for others: the hub would refuse it anyway.

export const ROUTES = [
  { path: "/", title: "Overview", group: "Hub", load: () => import("./screens/overview.js") },
  { path: "/queues", title: "Queues", group: "Messages", load: () => import("./screens/queues.js") },
];
