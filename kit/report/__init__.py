"""What there is to say of a plan, as text, page and picture.

Its rooms, in the order in which data walks:

    bottlenecks                   what limits a plan
    view                          what there is to say as one value, which the others draw; its length and money
    summary                       ``kit plan``
    plan_text, what_if            ``kit explain``, and what changes would do
    memory_report, memory_reasons, memory_text
                                  ``kit memory``: the figures, the sentences, the bars
    largest_model                 ``kit memory --largest``
    clusters                      ``kit plan --clusters``
    pipeline_schedule             the schedule of a pipeline
    html                          the page of ``kit plan --html``
"""
