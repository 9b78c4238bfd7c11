"""Several hosts on one machine, and the emitted launch files really run on them."""
