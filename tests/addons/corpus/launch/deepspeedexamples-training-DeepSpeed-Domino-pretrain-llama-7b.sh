deepspeed --num_gpus $WORLD_SIZE pretrain_llama.py $LLAMA_ARGS $DATA_ARGS $OUTPUT_ARGS
