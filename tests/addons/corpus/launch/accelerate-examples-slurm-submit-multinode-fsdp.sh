#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
srun accelerate launch --config_file ${ACCELERATE_DIR}/examples/slurm/fsdp_config.yaml --num_processes $((SLURM_NNODES * GPUS_PER_NODE)) --num_machines $SLURM_NNODES --rdzv_backend c10d --main_process_ip $head_node_ip --main_process_port 29500 $SCRIPT
