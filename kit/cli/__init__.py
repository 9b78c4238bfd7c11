"""The command line: parse, call, print. What a command does is a function of ``kit.api``.

Its rooms, in the order in which data walks:

    app                      the root; commands of add-ons
    options                  what several commands take
    plans                    ``plan``, ``explain``, ``memory``
    new_recipe               the recipe of ``kit train MODEL --data FILE``
    runs                     ``emit``, ``train``, ``rehearse``, ``recipes``
    conversions, generation  ``convert``, ``generate``
    answers                  the schema of ``--json``
"""

from kit.cli.app import app, main

__all__ = ["app", "main"]
