package fleetpulse.bench

import java.util.Arrays

import scala.collection.mutable.ArrayBuffer

/** A heartbeat, whose code is empty (the avro encoding of state takes no null in an array), or an error. */
final case class Message(deviceId: String, eventMs: Long, receivedMs: Long, boot: String, seq: Long, code: String)

/** Durations in milliseconds. */
final case class Rules(
    latenessMs: Long,
    timeoutMs: Long,
    degradedWindowMs: Long,
    flaggedWindowMs: Long,
    flaggedHoldMs: Long)

/** What is remembered of a device; instants are epoch milliseconds, `Fold.Never` where there is none.
  *
  * What waits lies in columns, in the order in which it will be judged. */
final case class Device(
    mode: Int, // not Byte: the avro encoding of state has none
    transitions: Long,
    lastSeen: Long,
    runtime: Long,
    olderError: Long,
    newerError: Long,
    firstStep: Long,
    secondStep: Long,
    degradedUntil: Long,
    flaggedUntil: Long,
    timer: Long,
    times: Array[Long],
    seqs: Array[Long],
    boots: Array[String],
    codes: Array[String])

final case class Transition(
    device_id: String,
    transition_no: Long,
    from_mode: String,
    to_mode: String,
    trigger: String,
    event_time_ms: Long,
    runtime_ms: Long)

object Fold {
  final val Never = Long.MinValue

  final val Provisioned: Int = 0
  final val Online: Int = 1
  final val Degraded: Int = 2
  final val Flagged: Int = 3
  final val Offline: Int = 4
  private val Names = Array("provisioned", "online", "degraded", "flagged", "offline")

  private val NoLongs = Array.empty[Long]
  private val NoStrings = Array.empty[String]
  val Unknown: Device =
    Device(Provisioned, 0, Never, 0, Never, Never, Never, Never, Never, Never, Never, NoLongs, NoLongs, NoStrings, NoStrings)
}

/** One device at work: messages are taken in, then all that is due is judged in event-time order. */
final class Fold(id: String, known: Device, rules: Rules) {
  import Fold._

  private var mode = known.mode
  private var transitions = known.transitions
  private var lastSeen = known.lastSeen
  private var runtime = known.runtime
  private var olderError = known.olderError
  private var newerError = known.newerError
  private var firstStep = known.firstStep
  private var secondStep = known.secondStep
  private var degradedUntil = known.degradedUntil
  private var flaggedUntil = known.flaggedUntil

  private var count = known.times.length
  private var times = known.times
  private var seqs = known.seqs
  private var boots = known.boots
  private var codes = known.codes
  private var newestReceived = Never

  private val out = new ArrayBuffer[Transition](2)

  def transitionsFound: Iterator[Transition] = out.iterator

  /** Up to where this device's messages are complete: bronze comes in order of reception. */
  def frontier(watermarkMs: Long): Long =
    if (newestReceived == Never) watermarkMs else math.max(watermarkMs, newestReceived - rules.latenessMs)

  /** Puts a message in its place among those that wait, unless it is late or a copy. */
  def take(message: Message): Unit = {
    if (message.receivedMs > newestReceived) newestReceived = message.receivedMs
    if (message.receivedMs - message.eventMs < rules.latenessMs) {
      var at = count
      while (at > 0 && comesBefore(message, at - 1)) at -= 1
      if (!isCopy(message, at)) insert(message, at)
    }
  }

  private def comesBefore(message: Message, at: Int): Boolean = {
    if (message.eventMs != times(at)) message.eventMs < times(at)
    else if (message.seq != seqs(at)) message.seq < seqs(at)
    else message.code.isEmpty && !codes(at).isEmpty
  }

  private def isCopy(message: Message, before: Int): Boolean = {
    var at = before - 1
    while (at >= 0 && times(at) == message.eventMs && seqs(at) == message.seq) {
      if (codes(at).isEmpty == message.code.isEmpty && boots(at) == message.boot) return true
      at -= 1
    }
    false
  }

  private def insert(message: Message, at: Int): Unit = {
    if (count == times.length) grow()
    if (at < count) {
      System.arraycopy(times, at, times, at + 1, count - at)
      System.arraycopy(seqs, at, seqs, at + 1, count - at)
      System.arraycopy(boots, at, boots, at + 1, count - at)
      System.arraycopy(codes, at, codes, at + 1, count - at)
    }
    times(at) = message.eventMs
    seqs(at) = message.seq
    boots(at) = message.boot
    codes(at) = message.code
    count += 1
  }

  private def grow(): Unit = {
    val size = count + math.max(4, count >> 1)
    times = Arrays.copyOf(times, size)
    seqs = Arrays.copyOf(seqs, size)
    boots = Arrays.copyOf(boots, size)
    codes = Arrays.copyOf(codes, size)
  }

  /** Judges messages and deadlines at or before the frontier, messages first at the same instant. */
  def foldTo(frontierMs: Long): Unit = {
    var next = 0
    while (next < count && times(next) <= frontierMs) {
      expire(times(next))
      hear(times(next))
      if (!codes(next).isEmpty) countError(times(next), codes(next))
      next += 1
    }
    expire(frontierMs + 1)
    if (next > 0 || count < times.length) {
      times = Arrays.copyOfRange(times, next, count)
      seqs = Arrays.copyOfRange(seqs, next, count)
      boots = Arrays.copyOfRange(boots, next, count)
      codes = Arrays.copyOfRange(codes, next, count)
      count -= next
    }
  }

  /** When something may happen next without a further message: heartbeats that find a device present change nothing. */
  def wakeAt: Long = {
    var at = nextDeadline
    var next = 0
    while (next < count) {
      if (!present || !codes(next).isEmpty) {
        if (at == Never || times(next) < at) at = times(next)
        next = count
      }
      next += 1
    }
    at
  }

  def toDevice(timer: Long): Device =
    Device(
      mode, transitions, lastSeen, runtime, olderError, newerError, firstStep, secondStep, degradedUntil, flaggedUntil,
      timer, times, seqs, boots, codes)

  private def present: Boolean = mode == Online || mode == Degraded || mode == Flagged

  private def nextDeadline: Long = {
    var at = if (present) lastSeen + rules.timeoutMs else Never
    if (degradedUntil != Never && (at == Never || degradedUntil < at)) at = degradedUntil
    if (flaggedUntil != Never && (at == Never || flaggedUntil < at)) at = flaggedUntil
    at
  }

  private def expire(beforeMs: Long): Unit = {
    var at = nextDeadline
    while (at != Never && at < beforeMs) {
      if (present && at == lastSeen + rules.timeoutMs) change(Offline, "silence", at)
      else if (at == degradedUntil) {
        degradedUntil = Never
        if (mode == Degraded) change(worn, "recovered", at)
      } else {
        flaggedUntil = Never
        if (mode == Flagged) change(worn, "hold_over", at)
      }
      at = nextDeadline
    }
  }

  private def worn: Int =
    if (flaggedUntil != Never) Flagged else if (degradedUntil != Never) Degraded else Online

  private def hear(atMs: Long): Unit = {
    if (present) runtime += atMs - lastSeen
    lastSeen = atMs
    if (!present) change(worn, "signal", atMs)
  }

  private def countError(atMs: Long, code: String): Unit = {
    if (olderError != Never && atMs - olderError <= rules.degradedWindowMs) {
      degradedUntil = olderError + rules.degradedWindowMs
      if (mode == Online) change(Degraded, "errors", atMs)
    }
    olderError = newerError
    newerError = atMs
    code match {
      case "escalation" =>
        if (secondStep != Never && atMs - secondStep <= rules.flaggedWindowMs) {
          flaggedUntil = atMs + rules.flaggedHoldMs
          if (mode == Online || mode == Degraded) change(Flagged, "sequence", atMs)
        }
      case "auth_failed" => if (firstStep != Never && atMs - firstStep <= rules.flaggedWindowMs) secondStep = firstStep
      case "reconnaissance" => firstStep = atMs
      case _ =>
    }
  }

  private def change(to: Int, trigger: String, atMs: Long): Unit = {
    transitions += 1
    out += Transition(id, transitions, Names(mode), Names(to), trigger, atMs, runtime)
    mode = to
  }
}
