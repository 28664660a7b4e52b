package fleetpulse.bench

import org.apache.spark.sql.{DataFrame, Dataset, Encoder, Encoders, KeyValueGroupedDataset}
import org.apache.spark.sql.functions.col
import org.apache.spark.sql.streaming._

/** The reference: one state a device, kept by the JVM. Called from Python, see bench/contenders.py. */
object Jobs {
  private implicit val key: Encoder[String] = Encoders.STRING
  private implicit val message: Encoder[Message] = Encoders.product[Message]
  private implicit val device: Encoder[Device] = Encoders.product[Device]
  private implicit val transition: Encoder[Transition] = Encoders.product[Transition]

  /** Groups by the column itself: `groupByKey` would make each row an object once more to find its key. */
  private def byDevice(messages: DataFrame): KeyValueGroupedDataset[String, Message] =
    messages.groupBy(col("deviceId")).as[String, Message]

  def rules(latenessMs: Long, timeoutMs: Long, degradedWindowMs: Long, flaggedWindowMs: Long, flaggedHoldMs: Long): Rules =
    Rules(latenessMs, timeoutMs, degradedWindowMs, flaggedWindowMs, flaggedHoldMs)

  def flatMapGroups(messages: DataFrame, rules: Rules): DataFrame =
    byDevice(messages)
      .flatMapGroupsWithState[Device, Transition](OutputMode.Append(), GroupStateTimeout.EventTimeTimeout()) {
        (id: String, arrived: Iterator[Message], state: GroupState[Device]) =>
          val fold = new Fold(id, if (state.exists) state.get else Fold.Unknown, rules)
          while (arrived.hasNext) fold.take(arrived.next())
          fold.foldTo(fold.frontier(state.getCurrentWatermarkMs()))
          state.update(fold.toDevice(Fold.Never))
          val wakeAt = fold.wakeAt
          if (wakeAt != Fold.Never) state.setTimeoutTimestamp(wakeAt)
          fold.transitionsFound
      }
      .toDF()

  def transformWithState(messages: DataFrame, rules: Rules): DataFrame =
    byDevice(messages)
      .transformWithState[Transition](new DeviceProcessor(rules), TimeMode.EventTime(), OutputMode.Append())
      .toDF()
}

/** Lazy timers: one stands for each device, moved only where something may happen before it. */
final class DeviceProcessor(rules: Rules) extends StatefulProcessor[String, Message, Transition] {
  @transient private var devices: ValueState[Device] = _

  override def init(outputMode: OutputMode, timeMode: TimeMode): Unit =
    devices = getHandle.getValueState[Device]("device", Encoders.product[Device], TTLConfig.NONE)

  override def handleInputRows(id: String, arrived: Iterator[Message], time: TimerValues): Iterator[Transition] = {
    val stored = devices.get()
    val known = if (stored == null) Fold.Unknown else stored
    val fold = new Fold(id, known, rules)
    while (arrived.hasNext) fold.take(arrived.next())
    fold.foldTo(fold.frontier(time.getCurrentWatermarkInMs()))
    devices.update(fold.toDevice(arm(known.timer, fold.wakeAt)))
    fold.transitionsFound
  }

  override def handleExpiredTimer(id: String, time: TimerValues, expired: ExpiredTimerInfo): Iterator[Transition] = {
    val fold = new Fold(id, devices.get(), rules)
    fold.foldTo(time.getCurrentWatermarkInMs())
    devices.update(fold.toDevice(arm(Fold.Never, fold.wakeAt)))
    fold.transitionsFound
  }

  private def arm(standing: Long, wanted: Long): Long =
    if (wanted == Fold.Never || (standing != Fold.Never && standing <= wanted)) standing
    else {
      if (standing != Fold.Never) getHandle.deleteTimer(standing)
      getHandle.registerTimer(wanted)
      wanted
    }
}
