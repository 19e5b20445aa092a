#!/bin/sh
# Print the GPUs of a pod as Spark's discovery of resources reads them.
nvidia-smi --query-gpu=index --format=csv,noheader | awk '
    { list = list sep "\"" $1 "\""; sep = ", " }
    END { print "{\"name\": \"gpu\", \"addresses\": [" list "]}" }'
