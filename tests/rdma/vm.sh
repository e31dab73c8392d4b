#!/usr/bin/env bash
# Runs a command on a Debian kernel with soft-RoCE (rdma_rxe) inside qemu, for machines without RDMA NICs.
#
#   tests/rdma/vm.sh [-n SERVERS] [-t SECONDS] [-i] COMMAND...
#
# With -i the guest's clock advances by 2 ns with every instruction: what is timed in it does not depend on how
# busy the host is.
#
# The guest is this machine: it sees the host's files read-only below an overlay (what it writes is lost),
# except the folder $OUT, which is /out in the guest. Server s has the NICs s{s}r0 and s{s}r1 with the addresses
# 10.7.0.{s+1} and 10.7.1.{s+1}, the RDMA devices rxe{s}_0 and rxe{s}_1 on them, and one bridge joins the
# NICs of each rail. A cable is cut by `ip link set ps{s}r{rail} down`, its far end.
#
# Exit status: the command's; 124 the time was over; 125 the guest did not come up; 77 this machine cannot
# do it, and standard error says why. What is missing is installed with apt when we are root.
set -euo pipefail
cannot() { echo "tests/rdma: skipped, $*" >&2; exit 77; }
usage() { echo "usage: $0 [-n SERVERS] [-t SECONDS] [-i] COMMAND..." >&2; exit 2; }

servers=2 limit_s=300 counts=
while getopts n:t:i option; do
  case $option in n) servers=$OPTARG ;; t) limit_s=$OPTARG ;; i) counts=yes ;; *) usage ;; esac
done
shift $((OPTIND - 1)); [ $# -gt 0 ] || usage
cache=${BML_RDMA_VM_CACHE:-$HOME/.cache/bml-rdma-vm} out=${OUT:-}
[ -n "$out" ] || { out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; }
mkdir -p "$cache" "$out"; rm -f "$out/rc"

memory=${BML_RDMA_VM_MEM:-2G} free_mib=$(awk '/MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
[ "$free_mib" -ge $(($(numfmt --from=iec "$memory") >> 20)) ] ||
  cannot "the guest takes up to $memory of memory and $free_mib MiB are free"

# 1. Programs. The guest runs the host's, so RDMA's user-space libraries are among them.
packages="qemu-system-x86 busybox-static iproute2 ibverbs-providers libibverbs1 librdmacm1 libpython3.11 perftest"
missing=
for package in $packages; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || missing="$missing $package"
done 2>/dev/null
if [ -n "$missing" ] || [ ! -e "$cache/initrd.img" ] || [ ! -d "$cache/pyverbs" ]; then
  [ "$(uname -m)" = x86_64 ] || cannot "the guest is x86_64 and this machine is $(uname -m)"
  command -v apt-get dpkg-deb >/dev/null || cannot "there is no apt to get qemu and a kernel with"
  grep -q 'VERSION_ID="12"' /etc/os-release || cannot "the guest's kernel and pyverbs are those of Debian 12"
fi
if [ -n "$missing" ]; then
  [ "$(id -u)" = 0 ] || cannot "not root, and these packages are not installed:$missing"
  install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >"$out/apt.log" 2>&1; }
  install || { apt-get update -qq >/dev/null 2>&1 && install; } ||
    cannot "apt cannot install$missing: $(tail -n 1 "$out/apt.log")"
fi

# Debian's package would bring udev and a Python along: its files alone are enough.
if [ ! -d "$cache/pyverbs" ]; then
  rm -rf "$cache/unpack"; mkdir "$cache/unpack"
  ( cd "$cache/unpack" && apt-get download -qq python3-pyverbs && dpkg-deb -x python3-pyverbs_*.deb . ) ||
    cannot "apt cannot download python3-pyverbs"
  mkdir "$cache/pyverbs.new"; mv "$cache"/unpack/usr/lib/python3/dist-packages/pyverbs "$cache/pyverbs.new/"
  mv "$cache/pyverbs.new" "$cache/pyverbs"; rm -r "$cache/unpack"
fi

# 2. Debian's kernel, unpacked and not installed, and a first file system of busybox and the modules in order.
if [ ! -e "$cache/initrd.img" ]; then
  kernel=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
  [ -n "$kernel" ] || cannot "apt knows no linux-image-amd64"
  rm -rf "$cache/boot" "$cache/lib"
  ( cd "$cache" && apt-get download -qq "$kernel" &&
    dpkg-deb --fsys-tarfile "$kernel"_*.deb | tar x ./boot ./lib/modules && rm "$kernel"_*.deb ) ||
    cannot "apt cannot download $kernel"
  version=$(ls "$cache/lib/modules"); busybox depmod -b "$cache" "$version"
  root=$(mktemp -d); mkdir -p "$root"/{bin,mods,proc,sys,dev}; cp "$(command -v busybox)" "$root/bin/"
  # crc32_generic is not named by rdma_rxe and must be there before it.
  awk -v want="virtio_pci 9pnet_virtio 9p overlay virtio_rng crc32_generic rdma_rxe ib_uverbs rdma_ucm veth bridge sch_netem" '
    { file = $1; sub(/:$/, "", file); name = file; sub(/.*\//, "", name); sub(/\.ko.*/, "", name)
      gsub(/-/, "_", name); path[name] = file; $1 = ""; needs[file] = $0 }
    function add(file,   all, i, n) {
      if (file in seen) return
      seen[file] = 1; n = split(needs[file], all, " "); for (i = n; i > 0; i--) add(all[i]); print file }
    END { n = split(want, all, " ")
          for (i = 1; i <= n; i++) if (all[i] in path) add(path[all[i]]); else print "no module " all[i] > "/dev/stderr" }
  ' "$cache/lib/modules/$version/modules.dep" | while read -r file; do
    cp "$cache/lib/modules/$version/$file" "$root/mods/"; basename "$file" >> "$root/mods/order"
  done
  cat > "$root/init" <<'INIT'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
while read m; do $b insmod /mods/$m || echo "vm: cannot load $m"; done < /mods/order
$b mkdir -p /lower /rw /new /out
$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 host /lower
$b mount -t tmpfs rw /rw; $b mkdir -p /rw/u /rw/w
$b mount -t overlay -o lowerdir=/lower,upperdir=/rw/u,workdir=/rw/w ov /new
$b mount -t 9p -o trans=virtio,version=9p2000.L,cache=none,msize=512000 out /out
$b mkdir -p /new/out /new/proc /new/sys /new/dev /new/run /new/tmp
for d in proc sys dev out; do $b mount --bind /$d /new/$d; done
for d in dev/shm run tmp; do $b mkdir -p /new/$d; $b mount -t tmpfs t /new/$d; done
$b mkdir -p /new/dev/pts; $b mount -t devpts pts /new/dev/pts
$b chroot /new /bin/bash /out/.guest.sh; echo $? > /out/rc
$b sync; $b poweroff -f
INIT
  chmod +x "$root/init"
  ( cd "$root"; find . | busybox cpio -o -H newc 2>/dev/null | gzip ) > "$cache/initrd.new"
  mv "$cache/initrd.new" "$cache/initrd.img"; rm -r "$root"
fi

# 3. What the guest runs: NICs, addresses, bridges, RDMA devices, then the command.
printf '%q ' "$@" > "$out/.command"
cat > "$out/.guest.sh" <<EOF
export HOME=$(printf %q "$HOME") PATH=$(printf %q "$PATH"):/usr/sbin:/sbin PYTHONDONTWRITEBYTECODE=1 BML_RDMA_VM=$servers
export PYTHONPATH=$(printf %q "$cache/pyverbs${PYTHONPATH:+:$PYTHONPATH}")
here=$(printf %q "$PWD") servers=$servers mtu=4200
EOF
cat >> "$out/.guest.sh" <<'EOF'
# The guest has a /tmp of its own, which hides a checkout that lies there.
[ -d "$here" ] || { mkdir -p "$here" && mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 here "$here"; }
cd "$here" || exit 125
ip link set lo up
# All servers are one machine, so packets between two of its addresses must be made to use the cable, and
# whoever has an address must answer for it on its own NIC alone. A NIC without a cable looks for its neighbours
# three times, and RDMA waits so long: every 30 ms instead of every second.
conf=net.ipv4.conf
sysctl -qw net.core.netdev_max_backlog=20000 $conf.all.rp_filter=0 $conf.default.rp_filter=0 \
  $conf.all.accept_local=1 $conf.default.accept_local=1 $conf.all.arp_ignore=1 $conf.all.arp_announce=2 \
  net.ipv4.neigh.default.retrans_time_ms=30
{ echo "rule add pref 200 lookup local"; echo "rule del pref 0"
  for r in 0 1; do echo "link add rail$r mtu $mtu type bridge"; echo "link set rail$r up"; done
  for ((s = 0; s < servers; s++)); do for r in 0 1; do
    nic=s${s}r${r} address=10.7.$r.$((s + 1)) table=$((1000 + 2 * s + r))
    echo "link add $nic mtu $mtu type veth peer name p$nic mtu $mtu"
    echo "link set p$nic master rail$r"; echo "link set p$nic up"; echo "link set $nic up"
    echo "addr add $address/24 dev $nic"; echo "route add 10.7.$r.0/24 dev $nic table $table"
    echo "rule add pref 100 iif lo from $address to 10.7.$r.0/24 lookup $table"
  done; done; } | ip -batch - || exit 125
for ((s = 0; s < servers; s++)); do for r in 0 1; do
  echo "link add rxe${s}_${r} type rxe netdev s${s}r${r}"
done; done > /run/rdma.batch
rdma -b /run/rdma.batch || exit 125
echo "vm: $(rdma link | wc -l) RDMA devices after $(cut -d' ' -f1 /proc/uptime) s"
eval "$(cat /out/.command)"
EOF

# 4. Boot. Software emulation unless asked otherwise: a /dev/kvm that cannot run a stock kernel hangs.
# One CPU: with two, soft-RoCE sees its packets in another order. Full preemption, as without it soft-RoCE was
# seen to spin on a cut cable for ever, on the only CPU, while who would mend the cable waited for that.
accel="-accel tcg,thread=multi -cpu max"
[ "${BML_RDMA_VM_ACCEL:-tcg}" = kvm ] && accel="-accel kvm -cpu host"
[ -z "$counts" ] || accel="-accel tcg,thread=single -cpu max -icount shift=1,sleep=on"
set +e
timeout "$limit_s" qemu-system-x86_64 $accel -m "$memory" -smp 1 -nodefaults -no-reboot \
  -display none -serial stdio -kernel "$cache"/boot/vmlinuz-* -initrd "$cache/initrd.img" \
  -append "console=ttyS0 quiet preempt=full panic=-1" -device virtio-rng-pci \
  -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
  -virtfs local,path="$PWD",mount_tag=here,security_model=none,readonly=on,multidevs=remap \
  -virtfs local,path="$out",mount_tag=out,security_model=none,multidevs=remap </dev/null
status=$?
[ -e "$out/rc" ] && exit "$(cat "$out/rc")"
[ $status = 124 ] && { echo "tests/rdma: the guest's $limit_s s are over" >&2; exit 124; }
exit 125
