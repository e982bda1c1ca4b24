class AutoTPError(Exception): pass
class PlanError(AutoTPError, ValueError): pass
class CaptureError(AutoTPError): pass
class GroupError(AutoTPError, RuntimeError): pass
class CheckError(AutoTPError): pass
def message(what, values, because, try_=None):
    return f"{what}\n  values   {values}\n  because  {because}" + (f"\n  try      {try_}" if try_ else "")
