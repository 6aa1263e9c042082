#!/usr/bin/env bash
# Starts SLURM on this host of a test network: slurm_node.sh FOLDER COUNT. Each host has 8 processors
# and 8 GPUs, which are files; host0 is the controller. Jobs of the partition high preempt others.
# The last host waits until all are ready. The daemons end with their host.
# A job starts again cred_expire seconds after it was requeued (120 by default).
set -euo pipefail
command -v slurmctld >/dev/null || { echo "not installed"; exit; }
folder=$1 last=$(($2 - 1))
export SLURM_CONF=$folder/slurm.conf
if [ "$(hostname)" = host0 ]; then
    mkdir "$folder"
    cat >"$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=host0
SlurmUser=root
AuthInfo=socket=$folder/munge.socket,cred_expire=20
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation=$folder
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmdLogFile=$folder/slurmd-%n.log
NodeName=host[0-$last] CPUs=8 Gres=gpu:8
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
END
    touch "$folder"/gpu{0..7}
    echo "Name=gpu File=$folder/gpu[0-7]" >"$folder/gres.conf"
    (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
        --pid-file="$folder/munge.pid" --log-file="$folder/munge.log" --seed-file="$folder/munge.seed"
    slurmctld 2>/dev/null
fi
slurmd -N "$(hostname)" 2>/dev/null
if [ "$(hostname)" = "host$last" ]; then
    until sinfo --noheader --states=idle --format=%D 2>/dev/null | grep -qx "$2"; do sleep 0.2; done
fi
