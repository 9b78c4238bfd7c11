"""The planner in a browser: ``kit ui``.

Only ``kit.ui.page`` and ``kit.ui.server`` import NiceGUI (extra ``ui``).
"""
