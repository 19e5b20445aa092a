#!/bin/bash
# Start what Spark's scheduler for Kubernetes asks of an image: a driver or an executor.
set -euo pipefail
role=${1:-}
shift || true
case "$role" in
driver)
    exec "$SPARK_HOME/bin/spark-submit" --deploy-mode client \
        --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
        --conf "spark.executorEnv.SPARK_DRIVER_POD_IP=$SPARK_DRIVER_BIND_ADDRESS" "$@"
    ;;
executor)
    # Spark passes the JVM's options as SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1 and so on.
    options=()
    for ((i = 0; ; i++)); do
        name="SPARK_JAVA_OPT_$i"
        [[ -v $name ]] || break
        options+=("${!name}")
    done
    exec "$JAVA_HOME/bin/java" "${options[@]}" \
        "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
        -cp "$SPARK_HOME/conf:$SPARK_HOME/jars/*" \
        org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
        --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" \
        --cores "$SPARK_EXECUTOR_CORES" --app-id "$SPARK_APPLICATION_ID" \
        --hostname "$SPARK_EXECUTOR_POD_IP" --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
        --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
*)
    exec "$role" "$@"
    ;;
esac
