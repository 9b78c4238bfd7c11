accelerate launch --multi_gpu --num_processes 16 --num_machines 2 --machine_rank 0 \
  --main_process_port 29500 nlp_example.py
