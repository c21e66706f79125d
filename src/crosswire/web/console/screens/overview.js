// The hub at a glance.

export async function show(screen) {
  screen.heading("Overview");
}
