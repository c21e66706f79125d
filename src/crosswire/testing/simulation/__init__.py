"""Simulated hubs, clients, networks, disks and clocks in one process, from one seed."""
