"""Why a plan is as it is, and why there is none.

Its rooms, in the order in which data walks:

    decisions    each choice, its reason, the cost of its alternatives
    notes        what a user should know of a legal layout, why a last resort was taken, where fewer GPUs are faster
    infeasible   the layout that comes closest, and the cheapest changes that help
"""
