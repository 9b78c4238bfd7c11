"""The planner in a browser: ``kit ui``.

    command     ``kit ui``
    server      this machine alone is answered
    page        widgets, bound to a state and its answer
    state       what the link keeps: keys and values of a recipe
    form        fields ↔ the state
    dropped     a trainer's file that a visitor drops
    answer      comparison, plan, rows of charts and tables
    charts      the answer as ECharts options

Only ``page`` and ``server`` import NiceGUI (extra ``ui``).
"""
