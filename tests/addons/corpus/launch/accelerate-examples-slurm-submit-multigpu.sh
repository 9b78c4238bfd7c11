#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
accelerate launch --num_processes $GPUS_PER_NODE $SCRIPT $SCRIPT_ARGS
