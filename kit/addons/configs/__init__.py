"""Configurations of other trainers: ``kit plan axolotl.yaml`` (docs/how-to/your-config.md).

Its rooms, in the order in which data walks:

    command                       ``kit plan FILE``
    entries                       a file's values, with the place of each
    yaml_entries, toml_entries, shell_entries, python_entries
                                  the forms that a file has
    tables                        what each key of a program means: data below ``tables``
    linked                        files that a file names
    walk                          a table's walk over a file: kit's fields, gaps, refusals
    workload                      kit's fields, on the user's GPUs
    extra_memory                  what a GPU holds that kit's workload has not: towers, adapters on experts, a reference
    reading                       a path, its table, its workload
    variants                      what the program could run instead
    known                         misspelt keys
    writing                       a plan in a program's keys: the walk backwards
    patch                         a file with some values changed
    answer, text                  what there is to say
"""
