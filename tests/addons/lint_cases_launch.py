"""For every rule of lint a launch line that it must speak of, and a neighbour that it must not. Beside the script lies
``ds.json``, for two GPUs in bf16."""

from __future__ import annotations

from tests.addons.lint_cases import LintCase

SPLIT = (
    "accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy SIZE_BASED_WRAP "
    "--use_parallelism_config --parallelism_config_tp_size=2 "
    "--parallelism-config-dp-shard-size 2"
)
OF_CONTEXT = (
    "accelerate launch --num_processes 4 --use_fsdp --fsdp_version 2 --use_parallelism_config "
    "--parallelism_config_cp_size 4 sft.py"
)
OF_FOUR = "deepspeed t.py --deepspeed ds.json --per_device_train_batch_size 4"
TRAINS = "torchrun --nproc_per_node 4 t.py --per_device_train_batch_size 4"
TWO = "--nnodes 2 --nproc-per-node 8"
MEGATRON = "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 2"
AT, MEET = "--master_addr node-a --master_port 29500", "--rdzv_endpoint node-a:29500"
BATCH, EIGHT_TASKS = "#SBATCH --nodes=2\n#SBATCH --gres=gpu:h100:8\n", "#SBATCH --ntasks-per-node=8\n"
EACH_EIGHT, EACH_N = f"srun torchrun {TWO} {MEET} t.py", f"srun torchrun --nnodes=2 --nproc_per_node=$N {MEET} t.py"
WORLD_8 = "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 2"
ON_TWO = f"torchrun {TWO} {MEET} --rdzv_backend c10d"
SPLIT_BY = "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8 --use_parallelism_config"
ON_N = f"#SBATCH -N2 --gpus-per-node=8 --ntasks-per-node=2\nsrun torchrun --nnodes 2 {MEET}"
SLOW, BY_YAML, ON_HOST = (
    "one-thread",
    "accelerate launch --config_file zero.yaml",
    "torchrun --nproc_per_node 8 t.py --deepspeed cpu.json",
)
TWO_MACHINES = f"{BY_YAML} --num_machines 2 --machine_rank 0 --main_process_ip node-a --deepspeed_multinode_launcher"
COMMAND_CASES = (
    LintCase(SLOW, ON_HOST, f"export OMP_NUM_THREADS=12\n{ON_HOST}", "warning", says=("nproc) / 8)", "torchrun gives")),
    LintCase(SLOW, f"# OMP_NUM_THREADS=12\n{ON_HOST}", f"OMP_NUM_THREADS=12 {ON_HOST}", "warning"),
    LintCase(SLOW, ON_HOST, ON_HOST.replace("cpu", "none"), "warning"),
    LintCase(SLOW, ON_HOST.replace("cpu", "nvme"), ON_HOST.replace("8", "1"), "warning"),
    LintCase(SLOW, ON_HOST.replace("8", "2"), ON_HOST.replace("8", "gpu"), "warning"),
    LintCase(SLOW, ON_HOST, ON_HOST.replace("torchrun --nproc_per_node", "deepspeed --num_gpus"), "warning"),
    LintCase(SLOW, ON_HOST, f". ./env.sh\n{ON_HOST}", "warning"),
    LintCase(SLOW, f"{BY_YAML} t.py", f"{BY_YAML} --num_processes 1 t.py", "warning", says=("nproc) / 8)",)),
    # DeepSpeed's launcher of accelerate does not read it.
    LintCase(
        SLOW,
        f"{BY_YAML} --num_cpu_threads_per_process 12 t.py",
        "accelerate launch --config_file fsdp.yaml --num_cpu_threads_per_process 12 t.py",
        "warning",
    ),
    LintCase(SLOW, f"{BY_YAML.replace('zero', 'fsdp')} --num_processes 1 t.py", ON_HOST.replace("8", "1"), "warning"),
    LintCase(SLOW, f"{TWO_MACHINES} standard t.py", f"{TWO_MACHINES} pdsh t.py", "warning", says=("nproc) / 4)",)),
    LintCase(
        SLOW,
        "accelerate launch --use_deepspeed --num_processes 8 --zero_stage 2 --offload_optimizer_device cpu t.py",
        "accelerate launch --use_deepspeed --num_processes 8 --zero_stage 2 --offload_optimizer_device none t.py",
        "warning",
    ),
    LintCase(
        SLOW,
        "accelerate launch --multi_gpu --num_processes 8 t.py --deepspeed cpu.json",
        "accelerate launch --multi_gpu --num_cpu_threads_per_process 9 --num_processes 8 t.py --deepspeed cpu.json",
        "warning",
    ),
    LintCase("unknown-option", "deepspeed --n_gpus 8 train.py", "deepspeed --num_gpus 8 train.py --n_gpus 8"),
    LintCase("unknown-option", "deepspeed --num 8 train.py", "deepspeed --num_gpu 8 train.py"),  # argparse takes it
    LintCase("unknown-option", "torchrun --nproc_per_gpu=8 train.py", "torchrun --nproc_per_node=8 train.py"),
    LintCase(
        "unknown-option",
        "accelerate launch --num_process 8 \\\n  train.py",
        "accelerate launch --num_processes 8 \\\n  train.py --num_process 8",
    ),
    LintCase(
        "former-launcher",
        "python -m torch.distributed.launch --nproc_per_node=8 train.py",
        "python3.11 -m torch.distributed.run --nproc_per_node=8 train.py",
        "warning",
    ),
    LintCase("former-launcher", "python -u -m torch.distributed.launch t.py", "torchrun t.py", "warning"),
    LintCase("one-process", "torchrun train.py", "torchrun $OPTIONS train.py", "warning"),
    LintCase("one-process", "torchrun train.py", "torchrun --nproc_per 8 train.py", "warning"),
    LintCase(
        "one-process",
        "python -m kit.training.interruptible -m torch.distributed.run t.py",
        "python -m kit.training.interruptible -m torch.distributed.run --nproc_per_node 2 t.py",
        "warning",
    ),
    LintCase("one-process", "# as before: \\\ntorchrun train.py", "# as before:\n# torchrun train.py", "warning"),
    LintCase("one-process", "python -u t.py --deepspeed ds.json", "python -u t.py", "warning"),
    LintCase("one-process", "python train.py --deepspeed ds.json", "deepspeed train.py --deepspeed ds.json", "warning"),
    LintCase(
        "one-process", "python t.py --deepspeed ds.json", "srun --ntasks=8 python t.py --deepspeed ds.json", "warning"
    ),
    LintCase("one-process", "torchrun t.py", "#SBATCH --ntasks-per-node=8\ntorchrun t.py", "warning"),
    LintCase("one-process", "#SBATCH --ntasks-per-node=1\ntorchrun t.py", "mpirun -n 8 torchrun t.py", "warning"),
    LintCase(
        "fsdp-and-deepspeed", "deepspeed t.py --fsdp full_shard --deepspeed ds.json", "deepspeed t.py --fsdp full_shard"
    ),
    LintCase(
        "fsdp-and-deepspeed", "accelerate launch --use_fsdp --use-deepspeed t.py", "accelerate launch --use_fsdp t.py"
    ),
    LintCase(
        "visible-devices",
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 4 t.py",
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 t.py",
    ),
    LintCase(
        "visible-devices",
        "export CUDA_VISIBLE_DEVICES=0,1,2\naccelerate launch --num_processes 4 t.py",
        "export CUDA_VISIBLE_DEVICES=0,1,2\naccelerate launch --num_machines 2 --main_process_ip n --num_processes 6 t",
    ),
    LintCase(
        "unknown-option", "accelerate launch --num_processes $((N * 8)) --num_process 2 t.py", "accelerate launch t.py"
    ),
    LintCase(
        "machine-rank", f"torchrun {TWO} --master-addr n0 --node-rank 2 t.py", f"torchrun {TWO} --node-rank 1 t.py"
    ),
    LintCase("main-process-ip", f"torchrun {TWO} train.py", f"torchrun {TWO} --rdzv-endpoint n0:29500 train.py"),
    LintCase(
        "main-process-ip",
        "accelerate launch --num_machines 2 train.py",
        "accelerate launch --num_machines 2 --main_process_ip n0 train.py",
    ),
    LintCase("main-process-ip", f"torchrun {TWO} train.py", f"torchrun {TWO} $MORE train.py"),
    LintCase("parallelism", f"{SPLIT} --num_processes 2 t.py", f"{SPLIT} --num_processes 4 t.py"),
    LintCase("parallelism", f"{SPLIT} --num_processes 2 t.py", f"{SPLIT} --num_processes $N t.py"),
    LintCase(
        "wrap-policy",
        "accelerate launch --use_fsdp --num_processes 8 t.py",
        "accelerate launch --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --num_processes 8 t.py",
        "warning",
    ),
    LintCase("not-read", "swift sft --model a", "torchrun --nproc_per_node 8 swift.py", "warning"),
    LintCase("not-read", "python -m pip install x", 'exec "$PYTHON" -m kit.training . "$@"', "warning"),
    LintCase("not-read", "echo torchrun", "python swift.py", "warning"),
    LintCase("not-read", "python t.py\nWORLD=2 trl sft --model a", "python t.py\necho trl sft", "note"),
    LintCase("node-rank", f"torchrun {TWO} {AT} train.py", f"torchrun {TWO} {AT} --node_rank $RANK train.py"),
    LintCase("node-rank", f"torchrun {TWO} {AT} t.py --model $M", f"torchrun {TWO} $MORE {AT} t.py --model $M"),
    LintCase("node-rank", f"torchrun {TWO} {MEET} t.py", f"torchrun {TWO} {MEET} --rdzv_backend c10d t.py"),
    LintCase("node-rank", f"torchrun {TWO} {AT} t.py", f"export PET_NODE_RANK=$R\ntorchrun {TWO} {AT} t.py"),
    LintCase(
        "node-rank",
        "accelerate launch --num_machines 2 --main_process_ip n0 t.py",
        "accelerate launch --num_machines 2 --main_process_ip n0 --machine_rank 0 t.py",
    ),
    LintCase("node-rank", f"srun torchrun {TWO} {AT} --node_rank 0 t.py", f"torchrun {TWO} {AT} --node_rank 0 t.py"),
    LintCase(
        "node-rank",
        f"srun torchrun {TWO} {AT} --node_rank $SLURM_NODEID t.py",
        f"srun bash -c 'torchrun {TWO} {AT} --node_rank $SLURM_NODEID t.py'",
    ),
    LintCase(
        "main-process-ip", f"torchrun {TWO} --master_addr localhost --node_rank 0 t.py", f"torchrun {TWO} {AT} t.py"
    ),
    LintCase("main-process-ip", f"torchrun {TWO} --rdzv_endpoint 127.0.0.1:29500 t.py", f"torchrun {TWO} {MEET} t.py"),
    LintCase(
        "main-process-ip",
        f"torchrun {TWO} {AT} --rdzv_backend c10d t.py",
        f"torchrun {TWO} {MEET} --rdzv_backend c10d t.py",
    ),
    LintCase(
        "main-process-ip",
        "H=localhost\nN=2\naccelerate launch --num_machines $N --main_process_ip $H --machine_rank 0 t.py",
        "H=localhost\nN=1\naccelerate launch --num_machines $N --main_process_ip $H --machine_rank 0 t.py",
    ),
    LintCase("tasks-and-processes", f"{BATCH}{EIGHT_TASKS}{EACH_EIGHT}", f"{BATCH}{EIGHT_TASKS}srun python t.py"),
    LintCase("tasks-and-processes", f"{BATCH}{EIGHT_TASKS}{EACH_EIGHT}", f"{BATCH}{EACH_EIGHT}"),
    LintCase("tasks-and-processes", f"{BATCH}N=16\n{EACH_N}", f"{BATCH}N=8\n{EACH_N}"),
    LintCase("tasks-and-processes", f"{EIGHT_TASKS}{EACH_EIGHT}", f"#SBATCH -n 1\n{EACH_EIGHT}", "warning"),
    LintCase("one-node", f"{BATCH}torchrun {TWO} {MEET} t.py", f"{BATCH}srun torchrun {TWO} {MEET} t.py"),
    LintCase("one-node", f"{BATCH}torchrun {TWO} {MEET} t.py", f"#SBATCH --nodes=1\ntorchrun {TWO} {MEET} t.py"),
    LintCase(
        "one-node", f"{BATCH}srun torchrun --nproc_per_node 8 t.py", f"{BATCH}srun torchrun {TWO} t.py", "warning"
    ),
    LintCase(
        "one-node",
        "for h in $(cat hostfile); do ssh $h torchrun --nproc_per_node 8 t.py; done",
        "torchrun --nproc_per_node 8 t.py",
        "warning",
    ),
    # Judged by megatron.core in test_lint_megatron.py.
    LintCase("megatron-argument", f"{MEGATRON} --global-batch-size 15", f"{MEGATRON} --global-batch-size 16"),
    LintCase(
        "broken-line",
        "torchrun --nproc_per_node 8 \\ \n  --nnodes 1 t.py",
        "torchrun --nproc_per_node 8 \\\n  --nnodes 1 t.py",
    ),
    LintCase("broken-line", "python t.py\n\n  --seed 1", "python t.py\nARGS=(\n  --seed 1\n)"),
    LintCase("given-twice", "python t.py --seed 1 --seed=2", "python t.py --seed 1 --seed=1", "warning"),
    LintCase("given-twice", "python t.py --path a --path b", "python t.py --path a", "note"),
    LintCase(
        "given-twice",
        "torchrun --nproc-per-node 8 --nproc_per_node 4 t.py",
        "torchrun --nproc_per_node 8 t.py --nproc_per_node 4",
        "warning",
    ),
    LintCase("all-arguments", "torchrun --nproc_per_node $@ t.py", "torchrun --nproc_per_node 8 t.py $@", "warning"),
    LintCase("all-arguments", 'deepspeed "$@" t.py --seed 1', 'deepspeed t.py --seed 1 "$@"', "warning"),
    LintCase("all-arguments", "python t.py --seed $@", "python t.py --bf16 $@", "warning"),
    LintCase(
        "unset-variable",
        "GPUS=8\ntorchrun --nproc_per_node $GPU t.py",
        "GPU=8\ntorchrun --nproc_per_node $GPU t.py",
        "warning",
    ),
    LintCase(
        "unset-variable", "torchrun --nproc_per_node $N t.py", "read N\ntorchrun --nproc_per_node $N t.py", "note"
    ),
    LintCase(
        "unset-variable",
        "accelerate launch --num_processes $((SLURM_NNODES * EACH)) t.py",
        "EACH=${EACH:-8}\naccelerate launch --num_processes $((SLURM_NNODES * EACH)) t.py",
        "note",
    ),
    LintCase(
        "unset-variable", "torchrun --nproc_per_node $N t.py", ". ./site.sh\ntorchrun --nproc_per_node $N t.py", "note"
    ),
    LintCase("hostfile", "deepspeed --num_nodes 2 t.py", "deepspeed -H hosts --num_nodes 2 t.py", "warning"),
    LintCase("chosen-twice", "deepspeed --include n0:0,1 --num_gpus 2 t.py", "deepspeed --include n0:0,1 t.py"),
    LintCase(
        "config-file-missing", "deepspeed t.py --deepspeed no.json", "deepspeed t.py --deepspeed ds.json", "warning"
    ),
    LintCase(
        "packing-split",
        f"{OF_CONTEXT} --packing true",
        f"{OF_CONTEXT} --packing false",
        says=("--packing: TRL does not pack rows under cp_size 4", "leave it out, or train by kit's own loop"),
    ),
    *(
        LintCase("weights-in-bf16", f"{TRAINS} --dtype bfloat16", good, "warning", says=("float32 with --bf16",))
        for good in (
            f"{TRAINS} --dtype float32 --bf16",
            f"{TRAINS} --dtype bfloat16 --use_peft",
            f"{TRAINS} --dtype bfloat16 --deepspeed ds.json --bf16",
            f"{TRAINS} --dtype bfloat16 --fsdp full_shard",
            "torchrun --nproc_per_node 4 t.py --dtype bfloat16",
        )
    ),
    LintCase("weights-in-bf16", f"{TRAINS} --torch_dtype bfloat16", f"{TRAINS} --torch_dtype auto", "warning"),
    # Judged by the Trainer itself in test_lint_trainer.py.
    LintCase("trainer-mismatch", OF_FOUR, f"{OF_FOUR} --bf16"),
    LintCase("trainer-mismatch", f"{OF_FOUR} --bf16 false", f"{OF_FOUR} --bf16_full_eval"),
    LintCase("trainer-mismatch", "deepspeed t.py --deepspeed ds.json --bf16", f"{OF_FOUR} --bf16 True"),
    LintCase(
        "dropped-argument",
        "torchrun --nproc_per_node 8 train.py --evaluation_strategy no",
        "torchrun --nproc_per_node 8 train.py --eval_strategy no",
    ),
    LintCase(
        "batch-arithmetic",
        "deepspeed --num_gpus 3 t.py --deepspeed ds.json",
        "deepspeed --num_gpus 2 t.py --deepspeed ds.json",
    ),
    # What a rule says where it computes something, and its other conditions.
    LintCase("unknown-option", "\ndeepspeed --n_gpus 8 t.py", "deepspeed --num_gpus 8 t.py",
             says=("config.sh:2: ", "--n_gpus: no option of deepspeed, which stops at it; did you mean --num_gpus?")),
    LintCase("unknown-option", "torchrun --standalone --zzz 1 t.py", "torchrun --standalone t.py --zzz 1",
             says=("--zzz: ", "; put it behind t.py, or remove it")),
    LintCase("visible-devices", "CUDA_VISIBLE_DEVICES=0,1, torchrun --nproc_per_node 4 t.py",
             "CUDA_VISIBLE_DEVICES=$G torchrun --nproc_per_node 4 t.py",
             says=("0,1, are visible, and 4 processes on a machine",)),
    LintCase("visible-devices", "accelerate launch --gpu_ids 0 --num_machines 2 --num_processes 4 t.py",
             "accelerate launch --gpu_ids 0,1 --num_machines 2 --num_processes 4 t.py",
             says=("0 are visible, and 2 processes on a machine",)),
    LintCase("machine-rank", f"torchrun {TWO} {AT} --node-rank 2 t.py",
             f"torchrun --nnodes 1:4 {AT} --node-rank 2 t.py",
             says=("rank 2 of 2 machines; ranks go from 0 to 1",)),
    LintCase("main-process-ip", f"torchrun {TWO} t.py", f"torchrun {TWO} $MORE", says=("2 nodes and no address",)),
    LintCase("main-process-ip", "accelerate launch --num_machines 3 t.py",
             "accelerate launch --num_machines 3 --config_file a.yaml t.py",
             says=("3 machines and no main_process_ip",)),
    LintCase("main-process-ip", f"{ON_TWO} t.py".replace("node-a", "[::1]"), f"{ON_TWO} t.py".replace("node-a",
             "[::2]"),
             says=("2 nodes that meet at ::1: each",)),
    LintCase("main-process-ip", f"{ON_TWO} t.py".replace("node-a", "localhost"), f"{ON_TWO} t.py",
             says=("2 nodes that meet at localhost",)),
    LintCase("main-process-ip", f"torchrun {TWO} --master_addr a --rdzv_backend c10d t.py",
             f"torchrun {TWO} --master_addr a --rdzv_backend static --node_rank 1 t.py",
             says=("--rdzv-backend c10d reads --rdzv-endpoint, and no --master-addr",)),
    LintCase("hostfile", "deepspeed --num_nodes 3 t.py", "deepspeed --num_nodes 3 --include n0@n1 t.py", "warning",
             says=("3 nodes and no --hostfile",)),
    LintCase("chosen-twice", "deepspeed --exclude n0:0 --num_nodes 2 t.py", "deepspeed --num_nodes 2 -H hosts t.py",
             says=("--num_nodes: --num_nodes beside",)),
    LintCase("node-rank", f"torchrun {TWO} {AT} t.py", f"torchrun --nproc_per_node 8 {AT} t.py",
             says=("2 nodes and no rank of this one: all are node 0; --node-rank, another",)),
    LintCase("node-rank", "accelerate launch --num_machines 2 --main_process_ip n0 t.py",
             "accelerate launch --num_machines 2 --config_file a.yaml t.py",
             says=("2 nodes and no rank of this one: accelerate launch stops; --machine_rank, another",)),
    LintCase("node-rank", f"srun torchrun {TWO} {AT} --node_rank 1 t.py",
             f"srun torchrun --nnodes 1 {AT} --node_rank 0 t.py", says=("says node 1 on each",)),
    LintCase("node-rank", f"#SBATCH -N 2\nsrun torchrun --nproc_per_node 8 {AT} --node_rank 0 t.py",
             f"#SBATCH -N 1\nsrun torchrun --nproc_per_node 8 {AT} --node_rank 0 t.py"),
    LintCase("node-rank", f"srun torchrun {TWO} {AT} --node_rank ${{SLURM_PROCID}} t.py",
             f"srun torchrun {TWO} {AT} --node_rank \\$SLURM_PROCID t.py",
             says=("puts in $SLURM_PROCID before srun starts", "srun bash -c '… $SLURM_PROCID …'")),
    LintCase("node-rank", f"srun torchrun {TWO} {AT} --node_rank $SLURM_NODEID t.py",
             f"srun torchrun {TWO} {AT} --node_rank $RANK_HERE t.py"),
    LintCase("tasks-and-processes", f"{BATCH}{EIGHT_TASKS}{EACH_EIGHT}",
             f"{BATCH}#SBATCH --ntasks-per-node=1\n{EACH_EIGHT}",
             says=("8 tasks a node start 8 processes each, and the job has 8 GPUs a node",)),
    LintCase("tasks-and-processes", f"{ON_N} --nproc_per_node gpu t.py", f"{ON_N} --nproc_per_node 4 t.py",
             says=("2 tasks a node start 8 processes each, and the job has 8",)),
    LintCase("tasks-and-processes", f"{EIGHT_TASKS}{EACH_EIGHT}", f"{EIGHT_TASKS}srun python t.py", "warning",
             says=("each of 8 tasks a node starts 8 processes",)),
    LintCase("one-node", f"{BATCH}torchrun {TWO} {MEET} t.py", f"{BATCH}python t.py",
             says=("the first of 2 nodes alone",)),
    LintCase("one-node", f"{BATCH}srun accelerate launch --num_processes 8 t.py",
             f"{BATCH}srun accelerate launch --config_file a.yaml t.py", "warning",
             says=("without --num_machines each",)),
    LintCase("one-node", "cat hostfile\ntorchrun --nproc_per_node 8 t.py",
             "export PET_NNODES=2\ncat hostfile\ntorchrun --nproc_per_node 8 t.py", "warning",
             says=("without --nnodes each",)),
    LintCase("one-process", "python t.py --deepspeed ds.json", "python t.py --deepspeed", "warning",
             says=("ds.json and no launcher: one",)),
    LintCase("megatron-argument", f"{WORLD_8} --global-batch-size 12", f"{WORLD_8} --global-batch-size 16",
             says=("12 is no multiple of micro batch 2 · 4 data-parallel ranks",)),
    LintCase("megatron-argument", f"{WORLD_8} --global-batch-size 12",
             f"{WORLD_8} --global-batch-size 12 --rampup-batch-size 4 4 8"),
    LintCase("megatron-argument", f"{WORLD_8} --global-batch-size 15 $MORE", f"{WORLD_8} --global-batch-size 12 $MORE",
             says=("15 is no multiple of micro batch 2;",)),
    LintCase("megatron-argument", f"{WORLD_8} --context-parallel-size 3", f"{WORLD_8} --context-parallel-size 4",
             says=("8 processes are no multiple of the 6 that share a model",)),
    LintCase("megatron-argument", f"{WORLD_8} --num-layers 9 --pipeline-model-parallel-size 2",
             f"{WORLD_8} --num-layers 9 --pipeline-model-parallel-size $PP",
             says=("--num-layers: 9 layers are no multiple of 2 pipeline stages; use",)),
    LintCase("megatron-argument", f"{WORLD_8} --num-layers 6 --pipeline-model-parallel-size 2 "
             "--num-layers-per-virtual-pipeline-stage 2",
             f"{WORLD_8} --num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
             says=("6 layers are no multiple of 2 pipeline stages of chunks of 2;",)),
    LintCase("megatron-argument", f"{WORLD_8} --num-attention-heads 3", f"{WORLD_8} --num-attention-heads 4",
             says=("--num-attention-heads: 3 heads are no multiple of the tensor parallel size 2",)),
    LintCase("megatron-argument", f"{WORLD_8} --num-attention-heads 4 --group-query-attention --num-query-groups 3",
             f"{WORLD_8} --num-attention-heads 4 --num-query-groups 3",
             says=("--num-query-groups: 4 heads in 3 query groups",)),
    LintCase("megatron-argument", f"{WORLD_8} --hidden-size 66 --num-attention-heads 4",
             f"{WORLD_8} --hidden-size 66 --num-attention-heads 4 --kv-channels 16",
             says=("--hidden-size: 66 is no multiple of 4 heads",)),
    LintCase("megatron-argument", f"{WORLD_8} --num-experts 6 --expert-model-parallel-size 4",
             f"{WORLD_8} --num-experts 8 --expert-model-parallel-size 4",
             says=("--num-experts: 6 experts are no multiple of the expert parallel size 4",)),
    LintCase("megatron-argument", f"{WORLD_8} --seq-length 4096 --max-position-embeddings 2048",
             f"{WORLD_8} --seq-length 4096 --max-position-embeddings 4096", says=("2048 positions for 4096 tokens",)),
    LintCase("megatron-argument", f"{WORLD_8} --fp16 --bf16", f"{WORLD_8} --bf16", says=("--fp16 and --bf16 at once",)),
    LintCase("megatron-argument", f"{WORLD_8} --fp16 --bf16", f"{WORLD_8} --fp16 --bf16".replace("pretrain_gpt", "t")),
    LintCase("megatron-argument", f"{WORLD_8} --fp16 --bf16 --num-layers 2".replace("pretrain_gpt", "t"),
             "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --fp16 --bf16"),
    LintCase("parallelism", f"{SPLIT} --num_processes 2 t.py", f"{SPLIT} t.py",
             says=("dp_shard 2 · tp 2 = 4, and num_processes is 2: accelerate",)),
    LintCase("parallelism", f"{SPLIT_BY} --parallelism_config_tp_size 8 t.py",
             f"{SPLIT_BY} --parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 4 t.py",
             says=("parallelism_config: dp_shard_size and cp_size are 1",)),
    LintCase("wrap-class", "accelerate launch --use_fsdp --fsdp_transformer_layer_cls_to_wrap GPT2Block t.py",
             "accelerate launch --use_fsdp --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer t.py",
             context={"model": "llama-3.1-8b"}, says=("config.sh:1: ", "GPT2Block is no class of llama-3.1-8b")),
    LintCase("broken-line", "torchrun --nproc_per_node 8 \\ \n  --nnodes 1 t.py", "torchrun --nproc_per_node 8 t.py",
             says=("config.sh:2: ", "--nnodes is a command of its own", "remove the blank behind the backslash")),
    LintCase("broken-line", "torchrun --nproc_per_node 8 t.py\n  --seed 1", "torchrun --nproc_per_node 8 t.py\ncd /\n"
             "  --seed 1", says=("config.sh:2: ", "--seed is a command", "end the line above with a backslash")),
    LintCase("broken-line", "python t.py\n# then\n  --seed 1", "python t.py\n# then\n# --seed 1",
             says=("config.sh:3: ",)),
    LintCase("given-twice", "torchrun --nproc_per_node 8 t.py --seed 1 --seed=2",
             "torchrun --nproc_per_node 8 t.py --seed 1 --seeds 2", "warning",
             says=("--seed: given as 1 and as 2: the last one",)),
    LintCase("given-twice", "python t.py --bf16 --bf16 no --bf16 yes", "python t.py --bf16 --bf16 no", "warning"),
    LintCase("all-arguments", 'torchrun --nproc_per_node "$@" t.py', "torchrun $@", "warning",
             says=("--nproc_per_node: takes the first",)),
    LintCase("all-arguments", "deepspeed $* t.py", "deepspeed $MORE t.py", "warning", says=("deepspeed takes the",)),
    LintCase("unset-variable", "GPUS=8\ntorchrun --nproc_per_node $GPU t.py", "GPUS=8\nsource x\ntorchrun "
             "--nproc_per_node $GPU t.py", "warning",
             says=("config.sh:2: ", "GPU is set nowhere here, and is empty unless", "did you mean GPUS?")),
    LintCase("unset-variable", "torchrun --nproc_per_node $((EACH * 2)) t.py",
             "torchrun --nproc_per_node $((SLURM_GPUS * 2)) t.py", "note",
             says=("EACH is set nowhere here, and is 0 unless", "or write ${EACH:?} to stop")),
    LintCase("unset-variable", "torchrun --nproc_per_node $N t.py",
             "for N in 1 2; do torchrun --nproc_per_node $N t.py; "
             "done", "note"),
    LintCase("not-read", "cd x\nuv run trl sft --model a", "cd x\nuv run python t.py", "warning",
             says=("config.sh:2: ", "what trl starts is not read")),
    LintCase("not-read", "CUDA_VISIBLE_DEVICES=0 nohup -x swift sft\npython t.py", "python t.py --swift", "note",
             says=("config.sh:1: ", "what swift starts is not read")),
    LintCase("config-file-missing", "\ndeepspeed t.py --deepspeed_config no.json",
             "deepspeed t.py --deepspeed_config $DS.json", "warning", says=("config.sh:2: ",
             "no.json is neither here")),
    LintCase("config-file-missing", "accelerate launch --config_file no.yaml t.py",
             "torchrun --nproc_per_node 8 t.py --config_file no.yaml", "warning"),
    LintCase("trainer-mismatch", OF_FOUR, f"{OF_FOUR} --bf16",
             says=("--bf16: --bf16 false by default, and bf16.enabled is true: the", 'write "auto" for bf16.enabled')),
    LintCase("trainer-mismatch", f"{OF_FOUR} --bf16 false --per_device_train_batch_size 4", f"{OF_FOUR} --bf16",
             says=("--bf16: --bf16 false by default",)),
    LintCase("trainer-mismatch", "torchrun --nproc_per_node 4 t.py --deepspeed ds.json --per_device_train_batch_size 4 "
             "--bf16", "torchrun --nproc_per_node 2 t.py --deepspeed ds.json --per_device_train_batch_size 4 --bf16",
             says=("--per_device_train_batch_size: --per_device_train_batch_size 4, --gradient_accumulation_steps 1 by "
                   "default on 4 processes, and train_batch_size is 8: the Trainer",)),
    LintCase("dropped-argument", "torchrun --nproc_per_node 8 t.py --eval_strategy no --no_cuda",
             "torchrun --nproc_per_node 8 t.py --eval_strategy no --use_cpu",
             says=("--no_cuda: transformers ", " has no such argument", "write --use_cpu")),
    LintCase("dropped-argument", "torchrun --nproc_per_node 8 t.py --per_device_train_batch_size 4 --warmup_ratio 0.1",
             "torchrun --nproc_per_node 8 t.py --train_batch_size 4 --warmup_ratio 0.1",
             says=("write --warmup_steps",)),
)  # fmt: skip
