#!/bin/bash
# Makes what the guest boots: a kernel, an initramfs and a root filesystem of Debian packages.
#
# Usage: build.sh OUT SUITE
#   OUT    folder that gets vmlinux, initrd, root.img and release; it must exist
#   SUITE  Debian release of packages and kernel: bookworm (6.1), trixie (6.12)
#
# Needs root and Debian's apt; qemu and the image tools are installed when missing. The
# mirrors are those of this machine. Nothing is mounted and no loop device is used.
set -euo pipefail

out=$1 suite=$2
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "$out/building.XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
root=$work/root

say() { echo "guest image: $*" >&2; }

# What the root tests and the daemon call. libseccomp2 is what runc is linked to.
packages=(systemd systemd-sysv dbus udev kmod iproute2 iptables nftables apparmor
  libseccomp2 procps util-linux strace busybox-static ca-certificates crun criu)

# Services that a guest of one command's life does not need and that cost seconds of
# emulated time. udevd stays (it handles links and mounts), its replay of events does not.
masked=(getty.target systemd-timesyncd.service systemd-networkd.service systemd-resolved.service
  systemd-firstboot.service systemd-random-seed.service systemd-update-utmp.service
  systemd-update-utmp-runlevel.service systemd-machine-id-commit.service systemd-remount-fs.service
  systemd-pstore.service systemd-binfmt.service systemd-hwdb-update.service systemd-sysusers.service
  systemd-journal-flush.service systemd-udev-trigger.service systemd-tmpfiles-clean.timer
  kmod-static-nodes.service ldconfig.service apparmor.service e2scrub_reap.service e2scrub_all.timer
  apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer
  sys-kernel-debug.mount sys-kernel-tracing.mount)

tools() {
  local want=() pair
  for pair in qemu-system-x86_64=qemu-system-x86 mmdebstrap=mmdebstrap mke2fs=e2fsprogs xz=xz-utils zstd=zstd lz4=lz4; do
    command -v "${pair%%=*}" >/dev/null || want+=("${pair#*=}")
  done
  # Debian 12 has virtiofsd in a package that qemu-system-x86 needs anyway, later releases on its own.
  apt-cache show virtiofsd >/dev/null 2>&1 && [ ! -x /usr/libexec/virtiofsd ] && [ ! -x /usr/lib/qemu/virtiofsd ] && want+=(virtiofsd)
  ((${#want[@]} == 0)) && return
  say "apt-get install ${want[*]}"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${want[@]}"; } >"$work/apt.log" 2>&1 ||
    { tail -5 "$work/apt.log" >&2; say "qemu and the tools for the image cannot be installed: ${want[*]}"; exit 1; }
}

# debootstrap ROOT: packages of the suite, then the kernel's package unpacked beside it.
debootstrap() {
  local mirrors main security
  mirrors=$(apt-get indextargets --format '$(REPO_URI)' | sort -u)
  main=$(grep -v security <<<"$mirrors" | head -1)
  security=$(grep security <<<"$mirrors" | head -1 || true)
  cat >"$work/kernel" <<'K'
set -eu
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
cd "$WORK"
name=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)
apt-get -o APT::Sandbox::User=root download "$name"
dpkg-deb -x linux-image-*.deb kernel.d
K
  local sources=("deb $main $suite main" "deb $main $suite-updates main")
  [ -z "$security" ] || sources+=("deb $security $suite-security main")
  WORK=$work mmdebstrap --mode=root --variant=minbase --include="$(IFS=,; echo "${packages[*]}")" \
    --aptopt='APT::Install-Recommends "false"' --aptopt='APT::Sandbox::User "root"' --aptopt='Acquire::Languages "none"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook="sh $work/kernel" "$suite" "$root" "${sources[@]}" >"$work/log" 2>&1 ||
    { tail -20 "$work/log" >&2; say "mmdebstrap of $suite went wrong"; exit 1; }
}

# modules: the kernel's modules into the root filesystem.
modules() {
  local from=$work/kernel.d/lib/modules
  [ -d "$from" ] || from=$work/kernel.d/usr/lib/modules
  release=$(ls "$from")
  rm -f "$from/$release/build" "$from/$release/source"
  mkdir -p "$root/lib/modules"
  cp -a "$from/$release" "$root/lib/modules/"
  chroot "$root" depmod "$release"
}

# kernel: the uncompressed kernel out of Debian's bzImage; qemu enters it directly, without
# emulating a decompressor. Where the payload is stands in the boot protocol's header.
kernel() {
  local image=$work/kernel.d/boot/vmlinuz-$release
  field() { od -An -v -j "$1" -N "$2" -t "u$2" "$image" | tr -d ' '; }
  local begin=$((($(field 0x1f1 1) + 1) * 512 + $(field 0x248 4))) size
  size=$(field 0x24c 4)
  tail -c "+$((begin + 1))" "$image" | head -c "$size" >"$work/payload" || true # tail's pipe closes early
  case $(head -c 4 "$work/payload" | od -An -tx1 | tr -d ' ') in
    fd377a58) xz -dcq --single-stream --ignore-check "$work/payload" ;;
    28b52ffd) zstd -dcq "$work/payload" ;;
    02214c18) lz4 -dcq "$work/payload" ;;
    1f8b*) gzip -dcq "$work/payload" ;;
  esac >"$work/vmlinux" 2>/dev/null || true # they complain of the size that follows the payload
  [ "$(head -c 4 "$work/vmlinux" | tail -c 3)" = ELF ] || { say "no kernel found inside vmlinuz-$release"; exit 1; }
}

# initrd: loads the disk's modules and goes on to systemd.
initrd() {
  local dir=$work/initrd.d module name
  mkdir -p "$dir"/{bin,proc,dev,root}
  cp "$root/bin/busybox" "$dir/bin/busybox"
  install -m 0755 "$here/init" "$dir/init"
  for module in virtio_pci virtio_blk ext4; do
    chroot "$root" modprobe -S "$release" --show-depends "$module"
  done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!seen[$0]++' | while read -r module; do
    name=$(basename "$module")
    case $name in
      *.xz) xz -dc "$root$module" ;;
      *.zst) zstd -dcq "$root$module" ;;
      *) cat "$root$module" ;;
    esac >"$dir/${name%%.ko*}.ko"
    echo "${name%%.ko*}.ko" >>"$dir/modules"
  done
  (cd "$dir" && find . | bin/busybox cpio -o -H newc) >"$work/initrd" 2>/dev/null
}

# settings: one machine whose only task is the agent.
settings() {
  local unit
  echo guest >"$root/etc/hostname"
  echo '127.0.0.1 localhost guest' >"$root/etc/hosts"
  echo 6265727468206775657374206d616368 >"$root/etc/machine-id"
  rm -f "$root/etc/fstab"
  for unit in "${masked[@]}"; do ln -sf /dev/null "$root/etc/systemd/system/$unit"; done
  mkdir -p "$root"/etc/systemd/{journald,system}.conf.d
  printf '[Journal]\nStorage=volatile\nRateLimitBurst=0\n' >"$root/etc/systemd/journald.conf.d/guest.conf"
  printf '[Manager]\nDefaultTimeoutStopSec=5s\n' >"$root/etc/systemd/system.conf.d/guest.conf"
  install -m 0755 "$here/agent" "$root/usr/local/sbin/guest-agent"
  install -m 0644 "$here/guest-agent.service" "$here/guest.target" "$root/etc/systemd/system/"
  ln -sf guest.target "$root/etc/systemd/system/default.target"
  rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/log/*
}

tools
say "Debian $suite (about half a minute)"
debootstrap
modules
kernel
initrd
settings
truncate -s 4G "$work/root.img"
mke2fs -q -F -t ext4 -m 0 -O ^has_journal,^metadata_csum,^resize_inode -E lazy_itable_init=1,root_owner=0:0 -d "$root" "$work/root.img"
mv "$work/vmlinux" "$work/initrd" "$work/root.img" "$out/"
echo "$release" >"$out/release"
say "kernel $release, $(du -m "$out/root.img" | cut -f1) MB"
