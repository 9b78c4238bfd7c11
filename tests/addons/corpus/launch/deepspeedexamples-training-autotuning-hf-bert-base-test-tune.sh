python -m torch.distributed.launch --nproc_per_node=$NGPUS $HF_PATH/run_glue.py --do_train --per_device_train_batch_size $PER_DEVICE_TRAIN_BATCH_SIZE
deepspeed --num_nodes=$NNODES $HF_PATH/run_glue.py --deepspeed ../dsconfigs/ds_config_z1.json --do_train --max_steps $MAX_STEPS
deepspeed --autotuning run --num_nodes=$NNODES $HF_PATH/run_glue.py --deepspeed ./ds_config_tune.json --do_train --max_steps $MAX_STEPS
