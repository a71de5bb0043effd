# Runs a command in the folder of this file and watches it: sh watch.sh LEASE COMMAND...
# Who started it asks for it by touching `alive`. Where nobody did for LEASE seconds, as the cable was
# pulled or adb died, the command is ended and the folder removed: a phone is left as it was.
cd "${0%/*}" || exit 1
lease=$1
shift
"$@" >log 2>&1 </dev/null &
runner=$!
left=$lease
while [ "$left" -gt 0 ]; do
  if [ -n "$runner" ] && ! kill -0 "$runner" 2>/dev/null; then
    wait "$runner"
    echo $? >exit || exit 1 # a full disk: the client sees that nobody is left
    runner=
  fi
  sleep 1
  if rm alive 2>/dev/null; then left=$lease; else left=$((left - 1)); fi
done
[ -z "$runner" ] || kill -9 "$runner"
folder=$PWD
cd / && rm -rf "$folder"
