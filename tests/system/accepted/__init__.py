"""Whether everything that the planner emits is accepted by the programs that will read it."""
