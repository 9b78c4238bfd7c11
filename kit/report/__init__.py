"""What there is to say of a plan, as text, page and picture.

Its rooms, in the order in which data walks:

    bottlenecks, total            what limits a plan; its length and money
    view                          all of it as one value, which the others draw
    summary                       ``kit plan``
    plan_text, what_if            ``kit explain``, and what changes would do
    memory_report, memory_reasons, memory_text
                                  ``kit memory``: the figures, the sentences, the bars
    largest_model                 ``kit memory --largest``
    clusters                      ``kit plan --clusters``
    pipeline_schedule             the schedule of a pipeline
    html                          the page of ``kit plan --html``
"""
