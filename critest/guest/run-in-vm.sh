#!/bin/bash
# run-in-vm.sh [options] 'COMMAND'
# Boots the image of build-image.sh (or resumes its snapshot), runs COMMAND (bash, root, systemd as PID 1,
# cgroup v2, AppArmor) inside, streams its output, exits with its status. The shared directories (default: $PWD)
# are visible inside at the same path, COMMAND starts in the first; all other changes are thrown away.
# Options: --share DIR (repeatable)  --share-ro DIR (repeatable)  --smp N  --mem MB  --timeout S  --accel auto|kvm|tcg  --cold (no snapshot)
#          --append 'KERNEL ARGS' (implies --cold)  --console FILE  --timing  --bake (make the snapshot only)
# Environment: VM_CACHE, VM_TIMEOUT, VM_ACCEL, VM_COLD, VM_TCG_CPU, VM_RAMDIR, VM_ENV="NAMES OF VARIABLES TO PASS", TMPDIR,
#   VM_FS_CACHE=auto (default always: changes made on the host during the run may not be seen inside)
# Exit status: that of COMMAND; 124 timeout; 125 the VM did not come up.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
CACHE=${VM_CACHE:-$here/cache/vm}
shares=() smp=2 mem=2048 limit=${VM_TIMEOUT:-600} accel=${VM_ACCEL:-auto} append= console= timing= cold=${VM_COLD:-} bake=
while [ $# -gt 0 ]; do case $1 in
  --share|--share-ro) shares+=("${1#--share}:$(cd "$2" && pwd)"); shift 2;; --smp) smp=$2; shift 2;; --mem) mem=$2; shift 2;;
  --timeout) limit=$2; shift 2;; --accel) accel=$2; shift 2;; --append) append=$2; cold=1; shift 2;; --cold) cold=1; shift;;
  --console) console=$2; shift 2;; --timing) timing=1; shift;; --bake) bake=1; shift;;
  --) shift; break;; -*) echo "unknown option $1" >&2; exit 2;; *) break;; esac; done
((${#shares[@]})) || shares=(":$PWD")
[ $# -ge 1 ] || [ -n "$bake" ] || { sed -n '2,12p' "$0" >&2; exit 2; }
[ -s "$CACHE/root.img" ] || { echo "run-in-vm: no image in $CACHE, run build-image.sh" >&2; exit 125; }
# KVM only where the CPU really has it: a /dev/kvm without vmx/svm (nested "PVM") runs a stock kernel only by
# instruction emulation: slower than TCG, and it dies on XRSTOR.
if [ "$accel" = auto ]; then
  if [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then accel=kvm; else accel=tcg; fi
fi
# TCG: Nehalem = x86-64-v2 without AVX/SMAP (-cpu max costs ~40-60 % more). cx16=off: QEMU 7.2's cmpxchg16b corrupts EFLAGS,
# so some newer Debian kernels do not boot with it.
case $accel in
  kvm) A=(-accel kvm -cpu host); cold=1;;      # cold boot; never tried with real KVM
  tcg) A=(-accel tcg,thread=multi,tb-size=512 -cpu "${VM_TCG_CPU:-Nehalem,cx16=off}");;
  *) echo "bad --accel" >&2; exit 2;; esac
snap=$CACHE/snap-$(echo "$(qemu-system-x86_64 --version | head -1) ${A[*]} $smp $mem $(cat "$CACHE/stamp")" | sha256sum | cut -c1-12)

now(){ echo $((${EPOCHREALTIME/[.,]/}/1000)); }; t0=$(now)
run=$(mktemp -d "${TMPDIR:-/tmp}/vm.XXXXXX"); pids=()
cleanup(){ local p; for p in "${pids[@]}"; do kill "$p" 2>/dev/null || true; done; rm -rf "$run" "$ram"; }
# guest RAM is a shared file (virtiofs needs that; resuming a snapshot is then a sparse copy): tmpfs where there is room
ramdir=${VM_RAMDIR:-/dev/shm}
[ -w "$ramdir" ] && [ "$(df -Pk "$ramdir" | awk 'NR==2{print $4}')" -gt $((mem*1024)) ] || ramdir=$run
ram=$ramdir/vmtest.$$.ram
trap cleanup EXIT; trap 'exit 130' INT TERM
: >"$run/rc"; : >"$run/out"; mkfifo "$run"/{ctl,mon}.{in,out}
K="console=ttyS0 panic=-1 quiet loglevel=3 mitigations=off nokaslr no_timer_check tsc=reliable random.trust_cpu=on \
rcupdate.rcu_expedited=1 cryptomgr.notests nowatchdog net.ifnames=0 systemd.show_status=false systemd.log_target=kmsg \
systemd.unified_cgroup_hierarchy=1 apparmor=1 security=apparmor $append"
Q=(qemu-system-x86_64 -name vmtest -M pc,usb=off,vmport=off,hpet=off,smm=off -nodefaults -no-user-config -display none -no-reboot
  "${A[@]}" -smp "$smp" -m "$mem" -object memory-backend-file,id=mem,size="${mem}M",mem-path="$ram",share=on -numa node,memdev=mem
  -kernel "$CACHE/vmlinux" -initrd "$CACHE/initrd" -append "$K" -device vmgenid,guid=auto
  -device virtio-blk-pci,drive=root -device virtio-serial-pci -device virtio-rng-pci -nic none
  -chardev pipe,id=ctl,path="$run/ctl" -device virtserialport,chardev=ctl,name=ctl
  -chardev file,id=out,path="$run/out" -device virtserialport,chardev=out,name=out
  -chardev file,id=rc,path="$run/rc" -device virtserialport,chardev=rc,name=rc
  -chardev pipe,id=mon,path="$run/mon" -mon chardev=mon,mode=readline
  -serial file:"${console:-$run/console}")
waitfor(){ local i; for ((i=0; i<limit*20; i++)); do grep -q "^$1 " "$run/rc" && return 0; kill -0 "$q" 2>/dev/null || return 1; sleep 0.05; done; return 1; }
fail(){ { echo "run-in-vm: $1"; cat "$run/qemu.log"; tail -30 "${console:-$run/console}"; } >&2; exit "${2:-125}"; }
mon(){ timeout 5 sh -c 'printf "%s\n" "$1" >"$2"' _ "$1" "$run/mon.in"; }

do_bake(){ # boot once to "agent waits for a script", save RAM + device state + disk
  echo "run-in-vm: making the snapshot (once per image)" >&2
  cp --sparse=always "$CACHE/root.img" "$run/disk"
  timeout -k 5 "$limit" "${Q[@]}" -drive file="$run/disk",format=raw,if=none,id=root,cache=unsafe </dev/null >"$run/qemu.log" 2>&1 & q=$!; pids+=($q)
  ( exec cat "$run/mon.out" >"$run/mon.log" ) & pids+=($!)
  waitfor ready || fail "boot failed"
  sleep 2; mon 'migrate_set_capability x-ignore-shared on'; mon "migrate \"exec:cat >$run/state\""
  mon quit; wait "$q" || fail "snapshot failed: $(tail -5 "$run/mon.log")"
  grep -aqi 'error\|not mig' "$run/mon.log" && fail "snapshot failed: $(cat "$run/mon.log")"
  cp --sparse=always "$ram" "$snap.ram"; mv "$run/disk" "$snap.img"; mv "$run/state" "$snap"
}
if [ -z "$cold" ] && [ ! -s "$snap" ]; then
  exec 9>"$CACHE/lock"; flock 9; [ -s "$snap" ] || do_bake; flock -u 9
  : >"$run/rc"; [ -n "$bake" ] && exit 0
  sh=(); for x in "${shares[@]}"; do sh+=("--share${x%%:*}" "${x#*:}"); done
  cleanup; trap - EXIT
  exec "$0" "${sh[@]}" --smp $smp --mem $mem --timeout $limit --accel $accel ${console:+--console "$console"} ${timing:+--timing} -- "$@"
fi
[ -n "$bake" ] && exit 0
if [ -n "$cold" ]; then D=(-drive file="$CACHE/root.img",format=raw,if=none,id=root,snapshot=on,cache=unsafe)
else D=(-drive file="$snap.img",format=raw,if=none,id=root,snapshot=on,cache=unsafe -incoming defer); cp --sparse=always "$snap.ram" "$ram"; fi

# shares: virtiofsd of QEMU 7.2 (Debian 12: in qemu-system-common), else the Rust one
vfsd=/usr/lib/qemu/virtiofsd; [ -x $vfsd ] || vfsd=/usr/libexec/virtiofsd
$vfsd --help 2>&1 | grep -q -- '--shared-dir' && rust=1 || rust=
add=() i=0
for x in "${shares[@]}"; do
  d=${x#*:} sock=$run/fs$i.sock cache=${VM_FS_CACHE:-always}  # "auto" drops the guest page cache at every open: exec of shared binaries ~5x slower
  if [ -n "$rust" ]; then VF=($vfsd --socket-path="$sock" --shared-dir "$d" --cache $cache --sandbox chroot --xattr)
  else VF=($vfsd --socket-path="$sock" -o source="$d" -o cache=$cache -o sandbox=chroot -o xattr --rlimit-nofile="$(ulimit -Hn)" -f); fi
  "${VF[@]}" >>"$run/virtiofsd.log" 2>&1 & pids+=($!)
  D+=(-chardev socket,id=fs$i,path="$sock"); add+=("device_add vhost-user-fs-pci,id=vfs$i,chardev=fs$i,tag=share$i,queue-size=1024")
  i=$((i+1))
done
{
  echo 'm(){ mkdir -p "$1"; for i in {1..400}; do mount -t virtiofs -o "$3" "$2" "$1" 2>/dev/null && return; sleep 0.05; done; echo "cannot mount $1"; exit 125; }'
  i=0; for x in "${shares[@]}"; do
    printf 'm %q share%s %s\n' "${x#*:}" $i "$([ "${x%%:*}" = -ro ] && echo ro || echo rw)"; i=$((i+1)); done
  printf 'date -s @%s >/dev/null; cd %q; unset -f m\n' "$(date +%s)" "${shares[0]#*:}"
  for v in ${VM_ENV:-}; do printf 'export %s=%q\n' "$v" "${!v-}"; done
  printf '%s\n#__END__\n' "$*"
} >"$run/script"
( exec cat "$run/script" >"$run/ctl.in" ) & pids+=($!)
( exec cat "$run/mon.out" >"$run/mon.log" ) & pids+=($!)
for ((i=0; i<${#shares[@]}; i++)); do for _ in {1..100}; do [ -S "$run/fs$i.sock" ] && break; sleep 0.02; done; done
timeout -k 5 "$limit" "${Q[@]}" "${D[@]}" </dev/null >"$run/qemu.log" 2>&1 & q=$!; pids+=($q)
tail -q -s 0.1 --pid="$q" -n +1 -f "$run/out" 2>/dev/null & t=$!; pids+=($t)
[ -n "$cold" ] || { mon 'migrate_set_capability x-ignore-shared on'; mon "migrate_incoming \"exec:cat <$snap\""; }
t1=$t0; if waitfor script; then t1=$(now); for c in "${add[@]}"; do mon "$c"; done; fi
wait "$q" && qrc=0 || qrc=$?
wait "$t" 2>/dev/null || true
st=$(sed -n 's/^exit //p' "$run/rc")
[ -n "$timing" ] && { times >"$run/times"; echo "vm: accel=$accel smp=$smp ${cold:+cold }total=$(($(now)-t0))ms script-sent=$((t1-t0))ms children-cpu=$(tail -1 "$run/times") guest-uptime: $(tr '\n' ';' <"$run/rc")" >&2; }
[ -n "$st" ] && exit "$st"
[ "$qrc" = 124 ] && fail "timeout after ${limit}s" 124
fail "no exit status (qemu rc=$qrc) $(tail -3 "$run/virtiofsd.log")"
