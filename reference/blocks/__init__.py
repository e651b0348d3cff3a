"""Block masks: how they are built from rules and lists, combined, reused, carried to physical pages and counted."""
