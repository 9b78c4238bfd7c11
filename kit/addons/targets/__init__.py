"""Files of a plan for other programs, which ``kit emit --target`` writes; that of ``pretrain_gpt`` is in every run
directory of Megatron. Each module has its files in ``FILES``.

    programs        versions of the programs
    kubernetes, skypilot
                    who starts the processes
    other_trainers, rl_trainers
                    programs that train instead of kit: axolotl and others; verl and OpenRLHF
    pretrain_gpt    Megatron-LM's own trainer
    deepspeed_switches
                    ``ds_config.json`` with one more of DeepSpeed's switches
"""
