"""Plan → text of files, one module a target. Only ``run_directory`` writes files.

Its rooms, in the order in which data walks:

    derived_file                  what kit knows of a file
    run_directory                 all files of a run: written, opened, compared with their hashes
    deepspeed, deepspeed_rationale
                                  ``ds_config.json``, and why its keys have their values
    trainer, own_optimizer, own_script, trl
                                  the same for the Trainer, for scripts of one's own, for TRL
    accelerate                    ``accelerate.yaml``
    megatron                      ``megatron.yaml``: the arguments of megatron-core's classes
    extra, of_recipe              keys that go to an engine as they are; a recipe's plan with them
    environment, launch, slurm    what starts the processes
    not_carried, markdown, readme
                                  which file starts what, and what a script does not get
    copy_recipe                   ``kit recipes copy``
"""
