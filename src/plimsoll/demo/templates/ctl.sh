#!/bin/sh
# ctl ENGINE start|stop|is-running|pids: what a service manager would be on a real machine
{export}exec {python} -m plimsoll.demo.fleet {folder}/"$1" "$2"
