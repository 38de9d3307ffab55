"""Stand-ins watched as guard watches engines, on a fake clock: how quiet and how sharp the judge is."""
