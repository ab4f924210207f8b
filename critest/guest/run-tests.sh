#!/bin/bash
# run-tests.sh PACKAGE_FOLDER...
# Builds the root tests of these packages of the project and runs them in the guest: cgroup v2, systemd, AppArmor.
# Environment: BERTH_DEPS (the folder .deps), ROOT_TESTS (regular expression of test names), VM_CACHE.
# Exit status: 0 when every package passed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
: "${BERTH_DEPS:=$top/.deps}" "${ROOT_TESTS:=.}"
export VM_CACHE=${VM_CACHE:-$BERTH_DEPS/guest}
"$here/build-image.sh" "$VM_CACHE"
out=$BERTH_DEPS/guest-tests
rm -rf "$out"; mkdir -p "$out"
script="export BERTH_DEPS=$(printf %q "$BERTH_DEPS") PATH=$(printf %q "$BERTH_DEPS")/bin:\$PATH; bad=0"
for dir in "$@"; do
  dir=${dir%/}; dir=${dir#./}
  name=${dir//\//-}.test
  (cd "$top" && go test -c -o "$out/$name" "./$dir")
  script+="; echo \"== $dir\"; cd $(printf %q "$top/$dir") && $(printf %q "$out/$name") -test.v -test.timeout 20m -test.run $(printf %q "$ROOT_TESTS") | awk '!/^=== |^PASS\$/' || bad=1"
done
exec "$here/run-in-vm.sh" --share-ro "$top" --timeout 1500 "set -o pipefail; $script; exit \$bad"
