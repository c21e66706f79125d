"""Attacks on a real hub by one peer, and what they cost a neighbour that has no part in them."""
