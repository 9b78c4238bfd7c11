#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
accelerate launch --config_file $ACCEL_CONFIG --gradient_accumulation_steps $GRAD_ACC_STEPS --num_machines $NUM_NODES --num_processes $WORLD_SIZE --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT --machine_rank $SLURM_PROCID --rdzv_backend=c10d --max_restarts 1 --tee 3 $SCRIPT_PATH --config $CONFIG_FILE $OPTIONAL_ARGS
