"""Finds the fastest legal layout that fits a model, a cluster and a job, and gives the reasons.

Its rooms, in the order in which data walks:

    request                     the question
    candidates                  every layout that could answer it
    rules                       what refuses one
    search                      the fastest legal one that fits
    fallbacks                   what is taken only where nothing else fits
    make_plan, plan             the answer, its predictions and its file
    explain                     reasons of a plan, and ways out where there is none
    calibration                 what measured runs correct
    sweep                       the same question of several requests
    compare, cluster_selection  all layouts, or several clusters, instead of one answer
    length, schedule            steps of a run, and its learning rate and batch at each
    elastic                     the plan on fewer of its nodes
"""
