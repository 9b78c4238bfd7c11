"""The training loop of all engines, and its files: metrics, checkpoints, summary.

Its rooms, in the order in which data walks:

    __main__                      the worker that a launcher starts for each rank
    run_lock                      one run a directory
    elastic                       the plan on the nodes that are there
    data                          the same samples for every engine and layout
    counters, stream_cursor       how far a run is
    hub_files                     what a run reads by its id on the Hugging Face hub
    start_point                   where a run starts
    loop, step_timing, gradient_norms
                                  the steps
    anomalies, stragglers         what is wrong with a step or a rank
    logging, progress, profile    what is said of them
    determinism                   runs that repeat bit for bit
    checkpoint                    what a run goes on from
    stopping, launcher_watchdog, interruptible
                                  how a run ends early
    finalize                      how it ends
    generate, completion          a look at what it has learned
"""
