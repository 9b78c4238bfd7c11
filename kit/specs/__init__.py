"""Specs of models, clusters, jobs, layouts and runs: frozen, validated values.

Its rooms, in the order in which data walks:

    text_files, yaml_dialect, strict_yaml
                                  files of a person, in bounds, with the line of every value
    text, count                   words and counts as people write them
    validation                    what every spec is: strict, immutable, hashable
    recipe, shipped, extra
                                  a recipe, those that come with kit, and keys for an engine
    catalog                       models, GPUs and nodes by name
    model, families, sizes
                                  the shape of a transformer, what its family decides, and a shape for a bare size
    huggingface, hf_keys, hf_family_rules, hf_rope, hf_floats
                                  ``config.json`` ↔ a model
    hub                           ``config.json`` by its id on the Hugging Face hub
    approximate, counting         a model type that no family describes, and its parameters by transformers
    cluster, local                what a user has, or this machine
    job, job_defaults, optimizers, epoch
                                  what is trained, what is usual for it, by which optimizer, on how many rows
    layout                        how ranks split the work, the choices of a user, and a layout in one line
    run                           data, schedule, checkpoints, logging: nothing that changes the plan
    other_programs                whose configuration a file is
"""
